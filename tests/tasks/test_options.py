"""Each of fairseq's and AD-DROP's options trains, or is refused with a sentence that says why."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from tests.tasks.fairseq_runs import AD_DROP, Finished, generate, hypotheses, train

pytestmark = pytest.mark.slow


def assert_trained(finished: Finished, updates: int) -> None:
    """All updates made, regularized, with finite losses and with drop rates."""
    lines = finished.check().lines()
    assert len(lines) == updates
    assert all(math.isfinite(float(line["loss"])) for line in lines)
    assert {line["attn_reg/regularized"] for line in lines} == {"1"} and lines[-1]["attn_reg/probe_fallbacks"] == "0"


@pytest.fixture(scope="module")
def plain_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """AD-DROP with nothing else."""
    return train(corpus, tmp_path_factory.mktemp("plain"), *AD_DROP, "--max-update", "4").check()


@pytest.mark.parametrize(
    "flags",
    [
        "--ad-drop-attribution integrated --ad-drop-integrated-path joint --attn-sites *",
        "--ad-drop-attribution integrated --ad-drop-integrated-nodes gauss-legendre --ad-drop-integrated-steps 4",
        "--ad-drop-attribution attention --attn-sites decoder.cross",
        "--ad-drop-labels gold",
        "--ad-drop-probe-dtype bfloat16",
        "--store-ema --ema-decay 0.9",
        "--memory-efficient-fp16",
        "--fp16 --fp16-no-flatten-grads",
    ],
)
def test_it_trains(flags: str, plain_run: Finished, corpus: Path, tmp_path: Path) -> None:
    finished = train(corpus, tmp_path, *AD_DROP, *shlex.split(flags), "--max-update", "4")
    assert_trained(finished, 4)
    if flags.startswith(("--ad-drop", "--attn-sites")):
        assert finished.losses() != plain_run.losses(), "the option has no effect"


def test_layerdrop_may_leave_out_any_layer(corpus: Path, tmp_path: Path) -> None:
    """Also every selected one at once, in the probe, in the forward or in both."""
    flags = shlex.split("--encoder-layerdrop 0.5 --decoder-layerdrop 0.2 --attn-sites encoder.self[1] --max-update 12")
    assert len(train(corpus, tmp_path, *AD_DROP, *flags).check().lines()) == 12
    assert len(hypotheses(generate(corpus, tmp_path / "checkpoint_last.pt"))) == 12


@pytest.mark.parametrize("flag", ["--checkpoint-activations", "--amp"])
def test_what_changes_no_loss(flag: str, plain_run: Finished, corpus: Path, tmp_path: Path) -> None:
    """fairseq's AMP is CUDA's autocast, which does nothing on a CPU."""
    finished = train(corpus, tmp_path, *AD_DROP, flag, "--max-update", "4")
    assert_trained(finished, 4)
    assert finished.losses() == plain_run.losses()


def test_update_freq_counts_forwards(corpus: Path, tmp_path: Path) -> None:
    """16 batches of 60 tokens are 4 updates an epoch; every forward of an update is regularized alike."""
    flags = ["--max-tokens", "60", "--update-freq", "4", "--ad-drop-cross-tuning", "update:1", "--max-update", "4"]
    finished = train(corpus, tmp_path, *AD_DROP, *flags).check()
    assert [line.get("attn_reg/regularized") for line in finished.lines()] == [None, "1", None, "1"]


def test_alignments_are_learnt_beside_ad_drop(corpus: Path, tmp_path: Path) -> None:
    """transformer_align supervises the weights of one attention, which dropping would make log 0; the others may."""
    flags = shlex.split("--arch transformer_align --load-alignments --alignment-layer 1 --alignment-heads 2")
    flags += shlex.split("--criterion label_smoothed_cross_entropy_with_alignment --alignment-lambda 1 --lr 0.02")
    flags += ["--attn-sites", "encoder.self decoder.self decoder.cross[0]", "--max-update", "24"]
    finished = train(corpus, tmp_path, *AD_DROP, *flags)
    assert_trained(finished, 24)
    losses = [float(line["alignment_loss"]) for line in finished.lines()]
    assert 0.1 < losses[-1] < losses[0]
