"""Two processes with half the batch each are one process with the whole batch; AttendOut in two stays in step."""

import random
import shlex
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comparing import differing
from tests.models.hf_folders import TOYS, make_encoder, make_toy
from tests.tasks.encoder_runs import encoder_arguments
from tests.tasks.fairseq_runs import (
    AD_DROP,
    Finished,
    Job,
    finish_ranks,
    read_checkpoint,
    start_ranks,
    train,
    train_arguments,
)
from tests.tasks.kills import everything, updates_of

pytestmark = pytest.mark.slow

#: no dropout and q = 1, so that nothing is drawn; plain SGD, so that a step is the gradient
FLAGS = [*AD_DROP, *shlex.split("--attn-sites * --ad-drop-q 1 --dropout 0 --attention-dropout 0 --max-tokens 5000")]
SGD = shlex.split("--optimizer sgd --lr 0.5 --clip-norm 0")
SENTENCES, RATE = 160, 0.5


def processes(corpus: Path, folder: Path, ranks: int, *flags: str, backend: str = "legacy_ddp") -> Finished:
    without = [] if "adam" in flags else ["--optimizer"]
    arguments = train_arguments(corpus, folder / "save", *FLAGS, *SGD, *flags, without=without)
    return finish_ranks(start_ranks(arguments, folder / "rank", ranks, backend=backend))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(folder / "save" / "checkpoint_last.pt")["model"])


def assert_alike(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """To 1e-5 of the largest value there is."""
    scale = max(value.abs().max() for value in theirs.values())
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= 1e-5 * scale, name


def test_the_gradient_of_two_processes_is_that_of_the_joined_batch(corpus: Path, tmp_path: Path) -> None:
    """An update on all sentences is the same by two processes, by one in two halves and at once; so is an empty one."""
    made = {name: tmp_path / name for name in ("two", "halves", "whole", "start")}
    half = ["--batch-size", str(SENTENCES // 2), "--max-update", "1"]
    processes(corpus, made["two"], 2, *half)
    processes(corpus, made["halves"], 1, *half, "--update-freq", "2")
    processes(corpus, made["whole"], 1, "--batch-size", str(SENTENCES), "--max-update", "1")
    processes(corpus, made["start"], 1, *half, "--lr", "1e-30")
    start = weights(made["start"])
    steps = {
        name: {key: (start[key] - value) / RATE for key, value in weights(made[name]).items()}
        for name in ("two", "halves", "whole")
    }
    assert max(value.abs().max() for value in steps["whole"].values()) > 1e-2
    assert_alike(steps["two"], steps["whole"])
    assert_alike(steps["two"], steps["halves"])


def test_three_updates_of_two_processes_are_those_of_one(corpus: Path, tmp_path: Path) -> None:
    """Also with PyTorch's data parallel on CPUs, where fairseq by itself fails."""
    three = ["--max-update", "3", "--ad-drop-cross-tuning", "epoch"]
    half = [*three, "--batch-size", str(SENTENCES // 2)]
    ours = processes(corpus, tmp_path / "two", 2, *half)
    pytorch = processes(corpus, tmp_path / "pytorch", 2, *half, backend="pytorch_ddp")
    assert_alike(weights(tmp_path / "pytorch"), weights(tmp_path / "two"))
    assert pytorch.lines()[1]["attn_reg/regularized"] == "1"
    theirs = processes(corpus, tmp_path / "whole", 1, *three, "--batch-size", str(SENTENCES))
    assert [line.get("attn_reg/regularized") for line in ours.lines()] == [None, "1", None]
    for key in ("loss", "gnorm", "wpb"):
        assert [line.get(key) for line in ours.lines()] == [line.get(key) for line in theirs.lines()]
    assert_alike(weights(tmp_path / "two"), weights(tmp_path / "whole"))


def test_two_processes_with_dropout_and_unequal_shares(corpus: Path, tmp_path: Path) -> None:
    """An odd number of batches: one process has a batch too few and goes along with an empty one.

    Layers are left out by each on its own.
    """
    flags = shlex.split("--dropout 0.1 --attention-dropout 0.1 --encoder-layerdrop 0.5 --ad-drop-q 0.5")
    flags += shlex.split("--batch-size 54 --max-update 4")
    finished = processes(corpus, tmp_path, 2, *flags, *shlex.split("--optimizer adam --lr 0.01"))
    assert len(finished.lines()) == 4 and finished.lines()[-1]["epoch"] == 2
    assert {line["attn_reg/regularized"] for line in finished.lines()} == {"1"}


#: nothing is drawn: no dropout, and every candidate is dropped; plain SGD, so that a step is the gradient
STILL_ENCODER = shlex.split(
    "--dropout 0 --attention-dropout 0 --classifier-dropout 0 --optimizer sgd --lr 0.05 --clip-norm 0"
)
ENCODER_AD_DROP = shlex.split("--attn-reg ad_drop --ad-drop-p 0.4 --ad-drop-q 1 --ad-drop-cross-tuning off")


def encoder_processes(row: str, folder: Path, name: str, ranks: int, *flags: str) -> Finished:
    data, encoder = folder / "data", folder / "encoder"
    if not data.exists():
        make_toy(data, row)
        make_encoder(encoder)
    arguments = encoder_arguments(row, data, encoder, folder / name / "save", *flags)
    return finish_ranks(start_ranks(arguments, folder / f"{name}-", ranks))


@pytest.mark.parametrize("row", ["rte", "wnut17"])
def test_two_processes_are_one_with_twice_the_batch(row: str, tmp_path: Path) -> None:
    """Words are counted over both, and so is the metric of the validation set, whose last batch is one's alone."""
    flags = [*STILL_ENCODER, *ENCODER_AD_DROP, "--max-epoch", "2"]
    two = encoder_processes(row, tmp_path, "two", 2, *flags)
    one = encoder_processes(row, tmp_path, "one", 1, *flags, "--update-freq", "2")
    assert len(two.lines()) == len(one.lines()) == 6
    for ours, theirs in zip(two.lines(), one.lines(), strict=True):
        assert ours["attn_reg/regularized"] == theirs["attn_reg/regularized"] == "1"
        assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), abs=2e-4)
    assert_alike(weights(tmp_path / "two"), weights(tmp_path / "one"))
    metric = f"valid_{TOYS[row][2]}"
    assert [line[metric] for line in two.lines("valid")] == [line[metric] for line in one.lines("valid")]


ROUND = 3
#: 7 batches an epoch: in the fourth update of each epoch the second process has an empty share
GAME = f"--attn-reg attend_out --attend-out-steps {ROUND} --attn-sites * --batch-size 23 --max-tokens 5000".split()


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
            kept = {name: [p.detach().clone() for p in model.parameters()] for name, model in players.items()}
            rounds.append({"shares": shares, "round": game.last_round, **kept})
            torch.save(rounds, folder / f"{rank}-rounds.pt")
            return learnt

        Game.end_round = listen
        return setup(*args, **kwargs)

    fairseq.tasks.setup_task = listening


def start_game(corpus: Path, folder: Path, *flags: str) -> list[Job]:
    arguments = train_arguments(corpus, folder / "save", *GAME, *flags)
    return start_ranks(arguments, folder / "rank", prepare=partial(keep_rounds, folder))


@pytest.mark.parametrize(("rounds", "flags"), [(20, ""), (4, "--update-freq 2")])
def test_rounds_in_step(rounds: int, flags: str, corpus: Path, tmp_path: Path) -> None:
    finished = finish_ranks(start_game(corpus, tmp_path, "--max-update", str(rounds * ROUND + 1), *flags.split()))
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


@pytest.mark.parametrize("accumulated", ["1", "2"])
def test_the_defender_is_a_plain_training_of_two_processes(accumulated: str, corpus: Path, tmp_path: Path) -> None:
    flags = ["--update-freq", accumulated, "--dropout", "0", "--attention-dropout", "0", "--max-update", "5"]
    finish_ranks(start_game(corpus, tmp_path / "plain", *flags, "--attn-reg", "none"))
    finish_ranks(start_game(corpus, tmp_path / "game", *flags, "--attend-out-steps", "6"))
    defender = everything(tmp_path / "game" / "save")["beside"]["defender"]["model"]
    assert differing(dict(defender), weights(tmp_path / "plain")) == []
    assert differing(weights(tmp_path / "game"), weights(tmp_path / "plain")), "the attacker is another"


def test_a_kill_inside_a_round(corpus: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["--save-interval-updates", "5", "--max-update", "14"]
    finish_ranks(start_game(corpus, whole, *flags))
    jobs = start_game(corpus, parts, *flags)
    assert jobs[0].wait_until(lambda: updates_of(jobs[0]) >= 6), jobs[0].output()[-2000:]
    time.sleep(random.Random(5).random() * 0.05)
    for job in jobs:
        job.kill()
    assert jobs[0].process.exitcode == -signal.SIGKILL
    cache = torch.load(parts / "save" / "attn_reg_state_5.pt", weights_only=True)["cache"]
    assert [(batch["rank"], batch["update"]) for batch in cache] == [(0, 0), (0, 1), (1, 1)], "rank 1 had none at 3"
    finished = finish_ranks(start_game(corpus, parts, *flags))
    assert len(finished.lines()) < 14 and "starts anew" not in finished.output
    assert differing(everything(parts / "save"), everything(whole / "save")) == []


def test_one_process_goes_on_with_what_two_began(corpus: Path, tmp_path: Path) -> None:
    finish_ranks(start_game(corpus, tmp_path, "--max-update", "5"))
    alone = train(corpus, tmp_path / "save", *GAME, "--max-update", "8").check()
    assert "starts anew" not in alone.output
    assert sum("attn_reg/attacker_won" in line for line in alone.lines()) == 1
    assert everything(tmp_path / "save")["beside"]["rounds"] == 2
