"""AttendOut killed at random moments, also inside a round, ends bit for bit where an undisturbed game does."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.fairseq_runs import Job, differing, train, train_arguments, trained_state
from tests.tasks.test_resume import die_while_copying, updates_of

pytestmark = pytest.mark.slow

#: an epoch has 17 updates (or half of them), a round 3, and a checkpoint is written every 4: most stand inside a round
UPDATES, ROUND, INTERVAL = 34, 3, 4
GAME = f"--attn-reg attend_out --attend-out-steps {ROUND} --attn-sites * --max-tokens 60 --max-update {UPDATES}".split()
GAME += f"--save-interval-updates {INTERVAL} --keep-interval-updates 1 --num-workers 1".split()
VARIANTS = [
    "",
    "--update-freq 2 --clip-norm 0.5 --lr-scheduler inverse_sqrt --warmup-updates 9 --attend-out-embedding shared "
    "--attend-out-credit round --attend-out-reward-examples 7 --attend-out-normalize",
]


@pytest.fixture(scope="module", params=VARIANTS)
def game(request: pytest.FixtureRequest) -> list[str]:
    return [*GAME, *request.param.split()]


@pytest.fixture(scope="module")
def undisturbed(game: list[str], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    finished = train(corpus, folder, *game).check()
    winners = [line["attacker_won"] for line in finished.lines() if line.get("attacker_won") is not None]
    assert len(winners) == UPDATES // ROUND and finished.lines()[-1]["epoch"] >= 2
    return folder


def everything(folder: Path) -> dict[str, Any]:
    """The attacker with its optimizer; defender, generator, their optimizers, baseline, round, cached batches."""
    state = torch.load(folder / f"attn_reg_state_{UPDATES}.pt", weights_only=True)
    assert state["rounds"] == UPDATES // ROUND and state["in_round"] == UPDATES % ROUND
    assert {batch["update"] for batch in state["cache"]} == set(range(UPDATES % ROUND))
    return {**trained_state(folder / "checkpoint_last.pt"), "game": state}


def test_three_kills_change_nothing(game: list[str], undisturbed: Path, corpus: Path, tmp_path: Path) -> None:
    generator = random.Random(4)
    continued_within_a_round = 0
    for attempt in range(3):
        job = Job("train", train_arguments(corpus, tmp_path, *game), tmp_path / f"{attempt}.log")
        moment = generator.randint(5, 9)
        assert job.wait_until(lambda job=job, moment=moment: updates_of(job) >= moment), job.output()[-2000:]
        time.sleep(generator.random() * 0.05)
        job.kill()
        assert job.process.exitcode == -signal.SIGKILL and "done training" not in job.output()
        newest = max(int(path.stem.rpartition("_")[2]) for path in tmp_path.glob("attn_reg_state_*.pt"))
        continued_within_a_round += newest % ROUND > 0
    assert continued_within_a_round
    finished = train(corpus, tmp_path, *game).check()
    assert len(finished.lines()) < UPDATES and "starts anew" not in finished.output
    assert differing(everything(tmp_path), everything(undisturbed)) == []


def die_while_saving(which: int) -> None:
    """In the training's process: the power goes when the `which`-th file, state or checkpoint, is half written."""
    save, count = torch.save, [0]

    def save_half(state: object, file: Any, *args: object, **kwargs: object) -> None:
        count[0] += 1
        if count[0] == which:
            with open(file, "wb") if isinstance(file, Path) else file as stream:
                stream.write(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        save(state, file, *args, **kwargs)

    torch.save = save_half


@pytest.mark.parametrize(
    ("die", "which"),
    [(die_while_saving, 5), (die_while_saving, 6), (die_while_copying, 3)],
    ids=["state", "checkpoint", "copy"],
)
def test_a_kill_while_a_file_is_written(
    die: Callable[[int], None], which: int, game: list[str], undisturbed: Path, corpus: Path, tmp_path: Path
) -> None:
    """The third time that fairseq saves, it writes the state, then the checkpoint, then copies it."""
    arguments = train_arguments(corpus, tmp_path, *game)
    killed = Job("train", arguments, tmp_path / "killed.log", partial(die, which)).wait()
    assert killed.status == -signal.SIGKILL and 2 * INTERVAL - 1 < len(killed.lines()) < UPDATES
    finished = train(corpus, tmp_path, *game).check()
    assert len(finished.lines()) < UPDATES and "starts anew" not in finished.output
    assert differing(everything(tmp_path), everything(undisturbed)) == []


def test_only_resuming_costs_space(corpus: Path, tmp_path: Path) -> None:
    """With validation: the best and the last checkpoint are as large as a plain training's, states are few."""
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    short = [*GAME, "--max-update", "14"]
    train(corpus, plain, *short, "--attn-reg", "none", without=["--disable-validation"]).check()
    train(corpus, ours, *short, without=["--disable-validation"]).check()
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        sizes = [(folder / name).stat().st_size for folder in (ours, plain)]
        assert abs(sizes[0] - sizes[1]) < 0.02 * sizes[1], f"{name}: {sizes}"
    assert {path.name for path in ours.glob("attn_reg_state_*")} == {"attn_reg_state_12.pt", "attn_reg_state_14.pt"}
    assert not list(plain.glob("attn_reg_state_*"))
