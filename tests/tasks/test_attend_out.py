"""AttendOut under fairseq: it trains and says so, its state stays beside the checkpoints, a continued run is exact."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from fairseq import checkpoint_utils

from attn_reg_plugin import find_sites
from tests.tasks.fairseq_runs import differing, read_checkpoint, train, trained_state

pytestmark = pytest.mark.slow
GAME = ["--attn-reg", "attend_out", "--attend-out-steps", "3", "--attn-sites", "*", "--save-interval-updates", "5"]
GAME += ["--keep-interval-updates", "1"]


def test_a_continued_game_ends_in_the_same_weights(corpus: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finished = train(corpus, whole, *GAME, "--max-update", "10").check()
    assert any("attacker_won" in line for line in finished.lines())
    train(corpus, parts, *GAME, "--max-update", "5").check()
    assert (parts / "attn_reg_state_5.pt").exists(), "in the middle of a round"
    train(corpus, parts, *GAME, "--max-update", "10").check()
    first, second = (trained_state(folder / "checkpoint_last.pt") for folder in (whole, parts))
    assert differing(first, second) == []
    states = [read_checkpoint(folder / "attn_reg_state_10.pt") for folder in (whole, parts)]
    assert differing(states[0]["generator"], states[1]["generator"]) == []
    assert "attn_reg" not in read_checkpoint(whole / "checkpoint_last.pt")["task_state"]


def test_a_round_is_logged_with_the_update_that_ends_it(corpus: Path, tmp_path: Path) -> None:
    """Also the last one of a run and of its continuation."""
    ended = []
    for last in ("6", "9"):
        lines = train(corpus, tmp_path, *GAME, "--max-update", last).check().lines()
        ended += [int(line["num_updates"]) for line in lines if line.get("attacker_won") is not None]
    assert ended == [3, 6, 9]


@pytest.mark.parametrize("subset", ["train", "valid"])
def test_reward_examples_are_no_longer_than_the_model_takes(subset: str, corpus: Path, tmp_path: Path) -> None:
    """fairseq leaves longer ones out of training; learned positions end there."""
    flags = shlex.split("--encoder-learned-pos --decoder-learned-pos --max-source-positions 6 --max-target-positions 6")
    flags += ["--attend-out-reward-subset", subset, "--max-update", "7"]
    finished = train(corpus, tmp_path, *GAME, *flags).check()
    assert "have invalid sizes and will be skipped" in finished.output
    assert sum(line.get("attacker_won") is not None for line in finished.lines()) == 2
    none = [flag if flag != "6" else "2" for flag in flags]
    refused = train(corpus, tmp_path / "none", *GAME, *none, "--skip-invalid-size-inputs-valid-test")
    assert refused.status != 0


@pytest.mark.parametrize("method", [GAME, ["--attn-reg", "ad_drop", "--ad-drop-cross-tuning", "off"]])
def test_an_average_of_the_weights_is_kept(method: list[str], corpus: Path, tmp_path: Path) -> None:
    """fairseq makes it by copying the model while it is attached."""
    train(corpus, tmp_path, *method, "--max-update", "4", "--store-ema", "--ema-fp32").check()
    extra = read_checkpoint(tmp_path / "checkpoint_last.pt")["extra_state"]
    assert extra["ema"].keys() == read_checkpoint(tmp_path / "checkpoint_last.pt")["model"].keys()


def test_encoder_and_decoder_of_unequal_widths(corpus: Path, tmp_path: Path) -> None:
    flags = ["--decoder-embed-dim", "8", "--max-update", "4"]
    finished = train(corpus, tmp_path, *GAME, *flags, without=["--share-all-embeddings"]).check()
    assert any("attacker_won" in line for line in finished.lines())


@pytest.mark.parametrize("method", ["attend_out", "scheduled_dropout"])
def test_a_model_that_is_only_read_is_stock(method: str, corpus: Path, tmp_path: Path) -> None:
    """Its task comes from the checkpoint, with the method's flags; a schedule's file may be gone."""
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text("drop encoder.self: {0: 0.5}\n", encoding="utf-8")
    flags = GAME if method == "attend_out" else ["--attn-reg", method, "--scheduled-dropout-schedule", str(schedule)]
    train(corpus, tmp_path / "run", *flags, "--max-update", "2").check()
    schedule.unlink()
    import attn_reg_plugin.tasks.attn_reg_translation  # noqa: F401  registers the checkpoint's task

    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "run" / "checkpoint_last.pt")])
    assert not model._forward_pre_hooks and not find_sites(model, "*")[0].attached
    again = train(corpus, tmp_path / "run", *flags, "--max-update", "3")
    assert (again.status == 0) == (method == "attend_out"), "training does need it"
    assert method == "attend_out" or "schedule.yaml cannot be read" in again.output
