"""A task that calls the models in its model, one for each language pair: each of them is regularized."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tasks.tasks_in_process import multilingual, sample, step

BATCH = {"a-b": sample(3), "a-c": sample(4)}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"ad_drop_labels": "gold", "attn_sites": "*"},
        {"attn_reg": "attention_layer_drop", "attention_layer_drop_p": 1.0, "attn_sites": "*"},
    ],
)
def test_each_pair_of_a_multilingual_task_is_regularized(flags: dict[str, Any]) -> None:
    plain, plain_log = step(*multilingual(attn_reg="none"), BATCH)
    task, model = multilingual(**flags)
    ours, log = step(task, model, BATCH)
    assert log["attn_reg/forwards"] == log["attn_reg/regularized"] == 2
    assert ours != plain and not any(key.startswith("attn_reg") for key in plain_log)
    assert not any(site.active for site in task.regularizer.attached_sites), "plain again after the step"
    task.regularizer.detach()


def test_a_multilingual_task_without_candidates_is_stocks() -> None:
    plain = step(*multilingual(attn_reg="none"), BATCH)[0]
    assert step(*multilingual(ad_drop_q=1e-30), BATCH)[0] == pytest.approx(plain, rel=1e-6)
    assert step(*multilingual(ad_drop_p=0.0), BATCH)[0] == plain


def test_parts_are_let_go_when_another_model_is_built() -> None:
    task, model = multilingual()
    task.build_model(task.args)
    parts = list(model.models.values())
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in parts)
