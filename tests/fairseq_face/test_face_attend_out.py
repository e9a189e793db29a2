"""AttendOut under fairseq: it trains, its state stays beside the checkpoints, and a continued run is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from fairseq_runs import differing, read_checkpoint, train, trained_state

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
