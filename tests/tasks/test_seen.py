"""What a task sees of the rest of fairseq's configuration, also one without a config dataclass."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from fairseq.tasks import LegacyFairseqTask
from torch import nn

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask
from tests.backends.fairseq_models import transformer, words
from tests.tasks.tasks_in_process import Regularized, attached, options, sample, step


class Older(LegacyFairseqTask):
    """fairseq's own kind of task without a config dataclass: its `cfg` is None, all flags are in `args`."""

    source_dictionary = target_dictionary = property(lambda self: words())

    def build_model(self, args: Namespace, from_checkpoint: bool = False) -> nn.Module:
        """`args.model`."""
        return args.model


class RegularizedOlder(AttnRegTask, Older):
    """Regularized."""


def older(**flags: Any) -> AttnRegTask:
    """A regularized task without a config dataclass, attached."""
    return attached(transformer(), RegularizedOlder, **flags)


def test_an_older_task_keeps_a_large_state_and_clips(tmp_path: Path) -> None:
    task = older(attn_reg="mixout", save_dir=str(tmp_path), restore_file="checkpoint_last.pt", clip_norm=0.25)
    assert task.cfg is None and task.sidecar.folder == tmp_path and task._clip_norm == 0.25
    assert task._restore_file == tmp_path / "checkpoint_last.pt"
    step(task, task.regularizer.model, sample())
    task.regularizer.begin_update(3)
    task.state_dict()
    assert task.sidecar.path(3).is_file()


def test_an_older_task_knows_its_length() -> None:
    progress = {"attn_reg": "head_drop", "head_drop_unit": "progress", "head_drop_turn": 0.5, "head_drop_end": 1.0}
    task = older(**progress, head_drop_p=0.4, max_update=8, max_epoch=0, update_freq=[1])
    step(task, task.regularizer.model, sample())
    task.regularizer.begin_update(2)
    assert task.regularizer.drop_probability() == pytest.approx(0.2)


def test_an_older_task_refuses_what_fairseq_cannot_train() -> None:
    with pytest.raises(ValueError, match=r"^--fp16 with --cpu fails in fairseq"):
        RegularizedOlder(options(fp16=True, cpu=True))
    RegularizedOlder(options(fp16=True, cpu=True, memory_efficient_fp16=True))


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"attn_reg": "hidden_cut", "attn_sites": "*"}, "--attn-sites"),
        ({"attn_reg": "ad_drop+hidden_cut", "attn_sites": "*"}, "--attn-sites"),
        (
            {"attn_reg": "attention_dropout", "attention_dropout_p_by_site": "decoder.self[9]: 0.1"},
            "--attention-dropout-p-by-site",
        ),
    ],
)
def test_a_refusal_names_a_flag_there_is(flags: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=rf"^{flag}: "):
        attached(transformer(), **flags)


@pytest.mark.parametrize("method", ["ad_drop", "none"])
@pytest.mark.parametrize("prefix", ["", "attn_"], ids=["older", "with a dataclass"])
def test_only_a_training_needs_the_checkpoint_on_all_ranks(
    prefix: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks; a task that only validates or translates is made as before, and builds from the checkpoint."""
    monkeypatch.setattr("attn_reg_plugin.tasks.refusals.world_size", lambda: 2)
    monkeypatch.setattr("attn_reg_plugin.tasks.refusals.torch", Namespace(__version__="2.6.0"))
    flags = {f"{prefix}save_dir": str(tmp_path), f"{prefix}load_checkpoint_on_all_dp_ranks": False}
    (tmp_path / "checkpoint_last.pt").touch()
    cfg = options(model=transformer(), attn_reg=method, **flags)
    task = (Regularized if prefix else RegularizedOlder)(cfg)
    assert task.build_model(cfg, from_checkpoint=True) is cfg.model
    with pytest.raises(ValueError, match=r"has a checkpoint to continue from, .* add --load-checkpoint-on-all-dp-r"):
        task.build_model(cfg)
    RegularizedOlder(options(**{**vars(cfg), f"{prefix}load_checkpoint_on_all_dp_ranks": True})).build_model(cfg)
