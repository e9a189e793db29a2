"""Bad input ends before training, in one sentence that says what was given, what is allowed, and where."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.distributed import ModuleProxyWrapper
from fairseq.models import FairseqMultiModel
from fairseq.models.hubert import HubertModel
from fairseq.models.nat import CMLMNATransformerModel
from fairseq.models.transformer_align import TransformerAlignModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask
from attn_reg_plugin.tasks.attn_reg_translation import AttnRegTranslationTask
from tests.backends.fairseq_models import transformer, words
from tests.processes import group_of_one
from tests.tasks.fairseq_runs import AD_DROP, Finished, make_corpus, train
from tests.tasks.tasks_in_process import (
    PROGRESS,
    GivenModel,
    Regularized,
    RegularizedExperts,
    attached,
    options,
    sample,
    step,
)

SITES = re.escape("encoder.self[0] encoder.self[1] decoder.self[0] decoder.cross[0] decoder.self[1] decoder.cross[1]")
ONE = "use another --attn-reg, such as ad_drop or scheduled_dropout"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"ad_drop_p": 1.5}, r"p is 1\.5, but must lie in \[0, 1\]"),
        ({"attn_sites": "encoder.cross"}, r"'encoder\.cross' matches nothing in this model; its sites are: " + SITES),
        ({"attn_sites": "self"}, r"'self' is not understood; write for example 'encoder\.self'"),
        ({"attn_reg": "dropblock"}, r"'dropblock', but must be one of none, ad_drop"),
        ({"attn_reg": "ad_drop+x"}, r"'ad_drop\+x', but must be one of none, .*; several are joined by \+"),
        ({"ad_drop_cross_tuning": "weekly"}, r"'weekly', but must be epoch, off, or update:N"),
        ({"ad_drop_attribution": "lime"}, r"'lime', but must be one of gradient, integrated, attention, random"),
        ({"ad_drop_probe_dropout": "maybe"}, r"--ad-drop-probe-dropout is 'maybe', but must be true or false"),
        ({"attn_reg": "ad_drop+hidden_cut", "attn_sites": "*"}, r"^--attn-sites: "),
        (
            {"attn_reg": "scheduled_dropout", "scheduled_dropout_schedule": "drop decoder.self[9]: 0:0.1"},
            r"^--scheduled-dropout-schedule: ",
        ),
        ({"attn_tpu": "True"}, r"^--bf16 and --memory-efficient-bf16 .* torch_xla is not installed; use --amp"),
        ({"attn_fp16": "True", "attn_cpu": "True"}, r"^--fp16 with --cpu fails in fairseq"),
        ({"attn_ddp_backend": "fully_sharded"}, r"^--ddp-backend fully_sharded .* --attn-reg ad_drop cannot act"),
    ],
    ids=str,
)
def test_a_bad_value_is_named(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attached(transformer(), **flags)


class MakesAnother(GivenModel):
    """As fairseq's sentence ranking: its `setup_task` makes a class that it names."""

    @classmethod
    def setup_task(cls, cfg: Namespace, **_: Any) -> MakesAnother:
        return MakesAnother(cfg)


class Lost(AttnRegTask, MakesAnother):
    """Would never be made."""


def bare(kind: type[nn.Module]) -> nn.Module:
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    return model


def aligning(layer: int, sites: str) -> AttnRegTask:
    names = Namespace(alignment_heads=1, alignment_layer=layer, full_context_alignment=False)
    inner = transformer()
    return attached(TransformerAlignModel(inner.encoder, inner.decoder, names), attn_sites=sites)


def trained(kind: type = Regularized, batch: dict[str, Any] | None = None, **flags: Any) -> None:
    task = attached(transformer(), kind, **flags)
    step(task, task.regularizer.model, batch or sample())


ALIGNED = {**sample(), "alignments": torch.zeros(4, 2).long(), "align_weights": torch.ones(4)}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a batch for each pair": (
        lambda: attached(FairseqMultiModel({"en-ro": transformer().encoder}, {"en-ro": transformer().decoder})),
        "FairseqMultiModel of Regularized is a model for each pair; .* your own of translation_multi_simple_epoch",
    ),
    "noise of the task's own": (
        lambda: attached(bare(CMLMNATransformerModel), attn_reg="attend_out"),
        rf"does not work with CMLMNATransformerModel of Regularized.*{ONE}",
    ),
    "no predictions": (
        lambda: attached(bare(HubertModel)),
        r"HubertModel of Regularized gives .*use --attn-reg attention_layer_drop",
    ),
    "no predictions of passes": (lambda: attached(bare(HubertModel), attn_reg="r_drop"), r"HubertModel of .* r_drop"),
    "the alignment layer": (
        lambda: aligning(1, "*"),
        r"decoder\.cross\[1\] is the attention that --alignment-layer 1 .* leave it out of --attn-sites",
    ),
    "alignments of passes": (
        lambda: trained(batch=ALIGNED, attn_reg="r_drop"),
        r"^--attn-reg r_drop repeats the batch, and alignments .*--load-alignments",
    ),
    "rewards of data in parts": (
        lambda: trained(attn_reg="attend_out", data="a:b", attend_out_reward_subset="train"),
        r"^--attn-reg attend_out: rewards are of one set of examples, but 'train' is in several parts; take 'valid'",
    ),
    "another class": (
        lambda: Lost.setup_task(options()),
        r"MakesAnother instead of a Lost, so --attn-reg would have no effect; give Lost",
    ),
    "nothing is called": (
        lambda: trained(RegularizedExperts, attn_reg="attention_layer_drop"),
        r"RegularizedExperts made an update without .* --attn-reg attention_layer_drop never acted",
    ),
    "no end": (lambda: trained(**PROGRESS), r"^--attn-reg head_drop: unit='progress' needs the number of updates"),
    "examples of data in parts": (
        lambda: AttnRegTranslationTask(options(attn_reg="none", data="a:b", train_examples=5), words(), words()),
        r"^--train-examples 5 would be drawn of each part of the data a:b; give --train-fraction",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_named(case: str) -> None:
    build, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        build()


def test_layer_drop_where_data_parallel_training_waits_for_gradients(tmp_path: Path) -> None:
    """fairseq's wrapper is around PyTorch's."""
    with group_of_one(tmp_path):
        task = attached(transformer(), attn_reg="attention_layer_drop")
        wrapped = ModuleProxyWrapper(DistributedDataParallel(task.regularizer.model))
        with pytest.raises(ValueError, match="add --find-unused-parameters, or --ddp-backend legacy_ddp"):
            step(task, wrapped, sample())


def test_what_works_is_not_refused() -> None:
    Regularized(options(attn_fp16="True", attn_cpu="True"))  # a task that only translates
    assert len(aligning(1, "encoder.self decoder.cross[0]").regularizer.attached_sites) == 3
    assert type(Lost.setup_task(options(attn_reg="none"))) is MakesAnother
    assert type(Regularized.setup_task(options())) is Regularized
    attached(transformer(), attn_fp16="True", attn_cpu="True", attn_memory_efficient_fp16="True")
    attached(transformer(), attn_reg="none", attn_ddp_backend="fully_sharded")
    for allowed in ({"data": "a", "train_examples": 5}, {"data": "a:b", "train_fraction": 0.5}):
        AttnRegTranslationTask(options(attn_reg="none", **allowed), words(), words())


GAME = ["--attn-reg", "attend_out", "--attend-out-steps", "21"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "flags", "said"),
    [
        ("", [*AD_DROP, "--ad-drop-p", "7"], r"p is 7\.0, but must lie in \[0, 1\]$"),
        ("", GAME, r"each of the 21 updates of a round .* 'valid' has 20"),
        ("nowhere", [*AD_DROP, "-s", "en", "-t", "ro"], "nowhere is no folder; give the"),
    ],
    ids=str,
)
def test_a_command_ends_in_one_sentence(data: str, flags: list[str], said: str, corpus: Path, tmp_path: Path) -> None:
    finished = train(tmp_path / data if data else corpus, tmp_path, *flags, "--max-update", "1")
    assert finished.status == 1
    last = finished.output.strip().splitlines()[-1]
    assert re.search(said, last), last
    assert finished.lines() == [] and not list(tmp_path.glob("checkpoint*.pt"))


@pytest.mark.slow
def test_a_vocabulary_that_does_not_fit_the_embedding(stock: Finished, tmp_path: Path) -> None:
    other = make_corpus(tmp_path / "other", words=31)
    finished = train(other, tmp_path / "save", *AD_DROP, "--finetune-from-model", str(stock.checkpoint))
    assert finished.status == 1 and finished.lines() == []
    assert re.search(r"embed_tokens.*\[5\d, 16\].*\[7\d, 16\]", finished.output), "both sizes are named"
    assert str(stock.checkpoint) in finished.output.strip().splitlines()[-1]
