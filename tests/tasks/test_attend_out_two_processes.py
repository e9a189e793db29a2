"""AttendOut in two processes: they stay in step with unequal shares, and go on exactly after a kill inside a round."""

from __future__ import annotations

import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.fairseq_runs import Job, differing, finish_ranks, start_ranks, train, train_arguments, trained_state
from tests.tasks.kills import updates_of

pytestmark = pytest.mark.slow
ROUND = 3
#: 7 batches an epoch: in the fourth update of each epoch the second process has an empty share
GAME = f"--attn-reg attend_out --attend-out-steps {ROUND} --attn-sites * --batch-size 23 --max-tokens 5000".split()
#: to continue: fairseq's own way of handing a checkpoint to the other processes fails since torch 2.6
EACH = ["--load-checkpoint-on-all-dp-ranks"]


def keep_rounds(folder: Path, rank: int) -> None:
    """In the training's process, once the plugin is imported: writes how every round ended."""
    import fairseq.tasks

    setup, rounds = fairseq.tasks.setup_task, []

    def listening(*args: object, **kwargs: object) -> object:
        from attn_reg_plugin.regularizers.attend_out.game import Game

        end = Game.end_round

        def listen(game: Any) -> dict[str, float]:
            shares = [batch.update for batch in game.cache]
            learnt = end(game)
            defender = game.defender
            players = {"attacker": defender.attacker, "defender": defender.model, "generator": game.generator}
            weights = {name: [p.detach().clone() for p in model.parameters()] for name, model in players.items()}
            rounds.append({"shares": shares, "round": game.last_round, **weights})
            torch.save(rounds, folder / f"{rank}-rounds.pt")
            return learnt

        Game.end_round = listen
        return setup(*args, **kwargs)

    fairseq.tasks.setup_task = listening


def start(corpus: Path, folder: Path, *flags: str) -> list[Job]:
    """Two processes of one training."""
    arguments = train_arguments(corpus, folder / "save", *GAME, *flags)
    return start_ranks(arguments, folder / "rank", prepare=partial(keep_rounds, folder))


@pytest.mark.parametrize(("rounds", "flags"), [(20, ""), (4, "--update-freq 2")])
def test_rounds_in_step(rounds: int, flags: str, corpus: Path, tmp_path: Path) -> None:
    finished = finish_ranks(start(corpus, tmp_path, "--max-update", str(rounds * ROUND + 1), *flags.split()))
    ours, theirs = (torch.load(tmp_path / f"{rank}-rounds.pt", weights_only=True) for rank in range(2))
    assert len(ours) == len(theirs) == rounds
    proposed = [sum(len(entry["shares"]) for entry in mine) for mine in (ours, theirs)]
    assert proposed[0] == rounds * ROUND * (2 if flags else 1) > proposed[1], "an empty share has no mask to judge"
    for mine, other in zip(ours, theirs, strict=True):
        del mine["shares"], other["shares"]
        assert differing(mine, other) == []
        assert differing(mine["attacker"], mine["defender"]) == []
    winners = [entry["round"]["attacker_won"] for entry in ours]
    assert set(winners) == {0.0, 1.0} or rounds < 20
    logged = [line["attn_reg/attacker_won"] for line in finished.lines() if "attn_reg/attacker_won" in line]
    assert [float(value) for value in logged] == winners
    assert differing(ours[0]["generator"], ours[-1]["generator"]), "it learns"


def everything(folder: Path, updates: int) -> dict[str, Any]:
    state = torch.load(folder / "save" / f"attn_reg_state_{updates}.pt", weights_only=True)
    return {**trained_state(folder / "save" / "checkpoint_last.pt"), "game": state}


@pytest.mark.parametrize("accumulated", ["1", "2"])
def test_the_defender_is_a_plain_training_of_two_processes(accumulated: str, corpus: Path, tmp_path: Path) -> None:
    flags = ["--update-freq", accumulated, "--dropout", "0", "--attention-dropout", "0", "--max-update", "5"]
    finish_ranks(start(corpus, tmp_path / "plain", *flags, "--attn-reg", "none"))
    finish_ranks(start(corpus, tmp_path / "game", *flags, "--attend-out-steps", "6"))
    plain = trained_state(tmp_path / "plain" / "save" / "checkpoint_last.pt")["model"]
    defender = everything(tmp_path / "game", 5)["game"]["defender"]["model"]
    assert differing(dict(defender), dict(plain)) == []


def test_a_kill_inside_a_round(corpus: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["--save-interval-updates", "5", "--max-update", "14"]
    finish_ranks(start(corpus, whole, *flags))
    jobs = start(corpus, parts, *flags)
    assert jobs[0].wait_until(lambda: updates_of(jobs[0]) >= 6), jobs[0].output()[-2000:]
    time.sleep(random.Random(5).random() * 0.05)
    for job in jobs:
        job.kill()
    assert jobs[0].process.exitcode == -signal.SIGKILL
    cache = torch.load(parts / "save" / "attn_reg_state_5.pt", weights_only=True)["cache"]
    assert [(batch["rank"], batch["update"]) for batch in cache] == [(0, 0), (0, 1), (1, 1)], "rank 1 had none at 3"
    refused = [job.wait() for job in start(corpus, parts, *flags)]
    assert all("add --load-checkpoint-on-all-dp-ranks" in each.output for each in refused)
    finished = finish_ranks(start(corpus, parts, *flags, *EACH))
    assert len(finished.lines()) < 14 and "starts anew" not in finished.output
    assert differing(everything(parts, 14), everything(whole, 14)) == []


def test_one_process_goes_on_with_what_two_began(corpus: Path, tmp_path: Path) -> None:
    finish_ranks(start(corpus, tmp_path, "--max-update", "5"))
    alone = train(corpus, tmp_path / "save", *GAME, "--max-update", "8").check()
    assert "starts anew" not in alone.output
    assert sum("attn_reg/attacker_won" in line for line in alone.lines()) == 1
    assert everything(tmp_path, 8)["game"]["rounds"] == 2
