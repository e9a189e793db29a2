"""Tasks that call parts of their model, or nothing that can be heard: acted on, or refused by name."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from fairseq.models.hubert import HubertModel
from fairseq.models.nat import CMLMNATransformerModel
from fairseq.models.transformer_align import TransformerAlignModel
from torch import nn

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask
from tests.backends.fairseq_models import transformer, words
from tests.tasks.tasks_in_process import (
    GivenModel,
    Regularized,
    RegularizedExperts,
    attached,
    multilingual,
    options,
    sample,
    step,
)

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


@pytest.mark.parametrize("method", ["ad_drop", "attention_layer_drop"])
def test_a_task_that_never_calls_its_model_is_stopped(method: str) -> None:
    model = transformer()
    task = attached(model, RegularizedExperts, attn_reg=method)
    with pytest.raises(ValueError, match=rf"RegularizedExperts made an update without .* --attn-reg {method} never"):
        step(task, model, sample())


class MakesAnother(GivenModel):
    """As fairseq's sentence ranking: its `setup_task` makes a class that it names."""

    @classmethod
    def setup_task(cls, cfg: Namespace, **_: Any) -> MakesAnother:
        """Always the same class."""
        return MakesAnother(cfg)


class Lost(AttnRegTask, MakesAnother):
    """Would never be made."""


def test_a_task_that_makes_another_class_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"MakesAnother instead of a Lost, so --attn-reg would have no effect; give Lost"
    ):
        Lost.setup_task(options())
    assert type(Lost.setup_task(options(attn_reg="none"))) is MakesAnother
    assert type(Regularized.setup_task(options())) is Regularized


# -- refused before training ------------------------------------------------------------------------------------------


def bare(kind: type[nn.Module]) -> nn.Module:
    """A model of a class, with nothing in it."""
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    return model


LOSS = pytest.mark.parametrize(
    "flags",
    [{"attn_reg": "attend_out"}, {"attn_reg": "child_tuning+head_drop", "child_tuning_mode": "driven"}],
    ids=["attend_out", "child_tuning"],
)


@LOSS
def test_batches_for_each_pair_are_refused(flags: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"\S+ does not work with Multilingual\w+ of RegularizedMultilingual"):
        multilingual(**flags)


@LOSS
def test_noise_of_the_tasks_own_is_refused(flags: dict[str, str]) -> None:
    use = "another --attn-reg" if flags["attn_reg"] == "attend_out" else "--child-tuning-mode free"
    with pytest.raises(ValueError, match=f"does not work with CMLMNATransformerModel of Regularized.*; use {use}"):
        attached(bare(CMLMNATransformerModel), **flags)


def test_a_forward_for_each_choice_is_refused_for_fisher_information() -> None:
    from attn_reg_plugin.tasks.attn_reg_sentence_ranking import AttnRegSentenceRankingTask

    flags = options(attn_reg="child_tuning", child_tuning_mode="driven")
    with pytest.raises(ValueError, match=r"^--child-tuning-mode driven needs a loss of one forward, and sentence"):
        AttnRegSentenceRankingTask(flags, words())


def test_attend_out_refuses_sounds() -> None:
    with pytest.raises(
        ValueError, match="attend_out does not work with HubertModel of Regularized, whose encoder reads"
    ):
        attached(bare(HubertModel), attn_reg="attend_out")


def test_a_model_without_predictions_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"HubertModel of Regularized gives .*use --attn-reg attention_layer_drop"):
        attached(bare(HubertModel))


@pytest.mark.parametrize(
    ("layer", "sites", "refused"),
    [(1, "*", True), (0, "decoder.cross[0]", True), (1, "encoder.self decoder.cross[0]", False)],
)
def test_the_layer_that_learns_alignments_is_refused(layer: int, sites: str, refused: bool) -> None:
    parts = transformer()
    names = Namespace(alignment_heads=1, alignment_layer=layer, full_context_alignment=False)
    model = TransformerAlignModel(parts.encoder, parts.decoder, names)
    if not refused:
        assert len(attached(model, attn_sites=sites).regularizer.attached_sites) == 3
        return
    with pytest.raises(ValueError, match=rf"decoder\.cross\[{layer}\] is the attention that --alignment-layer {layer}"):
        attached(model, attn_sites=sites)


@pytest.mark.parametrize("method", ["r_drop", "hidden_cut+head_drop"])
def test_alignments_of_several_passes_are_refused(method: str) -> None:
    """They are positions in the batch as it is, and the repeated one would have half of their loss."""
    task = attached(transformer(), attn_reg=method)
    batch = {**sample(), "alignments": torch.zeros(4, 2).long(), "align_weights": torch.ones(4)}
    with pytest.raises(ValueError, match=r"^--attn-reg \S+ repeats the batch, and alignments .*--load-alignments"):
        step(task, task.regularizer.model, batch)
