"""Where AD-DROP has nothing to do, training and translating are stock fairseq's, bit for bit."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.tasks.fairseq_runs import (
    AD_DROP,
    UPDATES,
    Finished,
    Trained,
    differing,
    generate,
    hypotheses,
    train,
    trained_state,
)

pytestmark = pytest.mark.slow


def logged(finished: Finished) -> list[list[str]]:
    """Loss and gradient norm of every update, and the losses of every validation."""
    updates = [[line["loss"], line["gnorm"]] for line in finished.lines()]
    return [*updates, *([line["valid_loss"]] for line in finished.lines("valid"))]


@pytest.mark.parametrize(
    "flags",
    [
        "--attn-reg none",
        "--attn-reg none --ad-drop-p 1 --ad-drop-q 1 --attn-sites *",
        "--attn-reg ad_drop --ad-drop-p 0 --ad-drop-q 0.5 --ad-drop-cross-tuning off --attn-sites *",
        "--attn-reg ad_drop --ad-drop-p 0.5 --ad-drop-q 0 --ad-drop-cross-tuning off --attn-sites *",
        "--attn-reg ad_drop --ad-drop-p 0.5 --ad-drop-q 0.5 --ad-drop-cross-tuning update:8 --attn-sites *",
    ],
)
def test_training_without_effect_is_stock_training(flags: str, stock: Trained, corpus: Path, tmp_path: Path) -> None:
    finished = train(corpus, tmp_path, *shlex.split(flags), *UPDATES, without=["--disable-validation"]).check()
    assert len(finished.losses()) == 8 and len(finished.lines("valid")) == 2
    assert logged(finished) == logged(stock.finished)
    ours = tmp_path / "checkpoint_last.pt"
    assert differing(trained_state(ours), trained_state(stock.checkpoint)) == []
    assert hypotheses(generate(corpus, ours)) == hypotheses(generate(corpus, stock.checkpoint))


def test_the_comparison_can_fail(stock: Trained, regularized: Trained) -> None:
    """AD-DROP at work shows in every loss and in every weight."""
    ours, theirs = logged(regularized.finished), logged(stock.finished)
    assert all(a != b for a, b in zip(ours, theirs, strict=True))
    state = trained_state(stock.checkpoint)
    differences = differing(trained_state(regularized.checkpoint), state)
    assert {f"/model/{name}" for name in state["model"] if "weight" in name} <= set(differences)


def test_cross_tuning_leaves_the_first_epoch_alone(stock: Trained, corpus: Path, tmp_path: Path) -> None:
    flags = [*AD_DROP, "--ad-drop-cross-tuning", "epoch", *UPDATES]
    finished = train(corpus, tmp_path, *flags, without=["--disable-validation"]).check()
    shares = [(line["epoch"], line["regularized"]) for line in finished.lines()]
    assert shares == [(1, "0")] * 6 + [(2, "1")] * 2
    assert finished.losses()[:6] == stock.finished.losses()[:6]
    assert finished.losses()[6] != stock.finished.losses()[6]
    assert finished.lines("valid")[0]["valid_loss"] == stock.finished.lines("valid")[0]["valid_loss"]


def test_update_cross_tuning_counts_updates(stock: Trained, corpus: Path, tmp_path: Path) -> None:
    finished = train(corpus, tmp_path, *AD_DROP, "--ad-drop-cross-tuning", "update:2", *UPDATES).check()
    assert [line["regularized"] for line in finished.lines()] == ["0", "0", "1", "1"] * 2
    assert finished.losses()[:2] == stock.finished.losses()[:2]
    assert finished.losses()[2] != stock.finished.losses()[2]


def test_translating_is_stock_whatever_the_task(regularized: Trained, corpus: Path) -> None:
    expected = hypotheses(generate(corpus, regularized.checkpoint))
    assert len(expected) == 12
    ours = generate(corpus, regularized.checkpoint, *AD_DROP, "--attn-sites", "*", task="attn_reg_translation")
    assert hypotheses(ours) == expected
