"""fairseq's options beside AD-DROP: the command trains, regularized, whatever else is on."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from tests.tasks.fairseq_runs import AD_DROP, UPDATES, Finished, Trained, generate, hypotheses, train

pytestmark = pytest.mark.slow


def assert_trained(finished: Finished, shares: list[str]) -> None:
    """All updates made, with finite losses, and such shares of them regularized."""
    lines = finished.check().lines()
    assert all(math.isfinite(float(line["loss"])) for line in lines)
    assert [line["attn_reg/regularized"] for line in lines] == shares and lines[-1]["attn_reg/probe_fallbacks"] == "0"


def test_half_precision_averaged_weights_and_accumulation(corpus: Path, tmp_path: Path) -> None:
    """16 batches of 60 tokens are 4 updates an epoch; every forward of an update is regularized alike."""
    flags = "--memory-efficient-fp16 --store-ema --ema-decay 0.9 --max-tokens 60 --update-freq 4 --max-update 4"
    cross_tuned = ["--ad-drop-cross-tuning", "update:1"]
    assert_trained(train(corpus, tmp_path, *AD_DROP, *shlex.split(flags), *cross_tuned), ["0", "1", "0", "1"])


def test_what_changes_no_loss(regularized: Trained, corpus: Path, tmp_path: Path) -> None:
    """fairseq's AMP is CUDA's autocast, which does nothing on a CPU."""
    flags = ["--attn-sites", "*", *UPDATES, "--checkpoint-activations", "--amp"]
    finished = train(corpus, tmp_path, *AD_DROP, *flags)
    assert_trained(finished, ["1"] * 8)
    assert finished.losses() == regularized.finished.losses()


def test_layerdrop_may_leave_out_any_layer(corpus: Path, tmp_path: Path) -> None:
    """Also every selected one at once, in the probe, in the forward or in both."""
    flags = shlex.split("--encoder-layerdrop 0.5 --decoder-layerdrop 0.2 --attn-sites encoder.self[1] --max-update 12")
    assert len(train(corpus, tmp_path, *AD_DROP, *flags).check().lines()) == 12
    assert len(hypotheses(generate(corpus, tmp_path / "checkpoint_last.pt"))) == 12


def test_alignments_are_learnt_beside_ad_drop(corpus: Path, tmp_path: Path) -> None:
    """transformer_align supervises the weights of one attention, which dropping would make log 0; the others may."""
    flags = shlex.split("--arch transformer_align --load-alignments --alignment-layer 1 --alignment-heads 2")
    flags += shlex.split("--criterion label_smoothed_cross_entropy_with_alignment --alignment-lambda 1 --lr 0.02")
    flags += ["--attn-sites", "encoder.self decoder.self decoder.cross[0]", "--max-update", "24"]
    finished = train(corpus, tmp_path, *AD_DROP, *flags)
    assert_trained(finished, ["1"] * 24)
    losses = [float(line["alignment_loss"]) for line in finished.lines()]
    assert 0.1 < losses[-1] < losses[0]
