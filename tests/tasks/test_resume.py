"""Trainings killed at random moments end bit for bit where one that nobody disturbed does: each method, each face."""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.models.hf_folders import TOYS, make_encoder
from tests.tasks.encoder_runs import encoder_arguments
from tests.tasks.fairseq_runs import AD_DROP, Job, differing, train, train_arguments, trained_state
from tests.tasks.kills import die_while_copying, die_while_saving, everything, kill_after, kill_while, updates_of

pytestmark = pytest.mark.slow

#: a checkpoint within epochs too, only the newest kept; batches are made by a worker process
SAVING = shlex.split("--save-interval-updates 4 --keep-interval-updates 1 --num-workers 1")
ROUND = 3
GAME = shlex.split(f"--attn-reg attend_out --attend-out-steps {ROUND} --attn-sites *")
#: an epoch has 16 or 17 updates, or half of them: most checkpoints stand inside an epoch, and inside a round
TRANSLATIONS = {
    "ad_drop": [*AD_DROP, *shlex.split("--attn-sites * --ad-drop-cross-tuning epoch --max-update 44")],
    "ad_drop by updates": [*AD_DROP, *shlex.split("--attn-sites * --ad-drop-cross-tuning update:5 --max-update 44")],
    "attend_out": [*GAME, "--max-update", "34"],
    "attend_out accumulated": [
        *GAME,
        *shlex.split(
            "--update-freq 2 --clip-norm 0.5 --lr-scheduler inverse_sqrt --warmup-updates 9 --attend-out-normalize "
            "--attend-out-embedding shared --attend-out-credit round --attend-out-reward-examples 7 --max-update 34"
        ),
    ],
}


def check_game(state: dict[str, Any], updates: int) -> None:
    """It ends inside a round, whose batches are kept."""
    game = state["beside"]
    assert game["rounds"] == updates // ROUND and game["in_round"] == updates % ROUND
    assert {batch["update"] for batch in game["cache"]} == set(range(updates % ROUND))


@pytest.mark.parametrize("case", TRANSLATIONS)
def test_kills_change_nothing(case: str, corpus: Path, tmp_path: Path) -> None:
    """Two at random moments, and one while each kind of file is written: state, checkpoint and its copy."""
    flags, whole, parts = [*TRANSLATIONS[case], *SAVING, "--max-tokens", "60"], tmp_path / "whole", tmp_path / "parts"
    updates, generator, within_a_round = int(flags[flags.index("--max-update") + 1]), random.Random(case), 0
    undisturbed = train(corpus, whole, *flags).check().lines()
    assert len(undisturbed) == updates and undisturbed[-1]["epoch"] >= 2
    arguments, logs = train_arguments(corpus, parts, *flags), (tmp_path / f"{number}.log" for number in range(9))
    kills = [(die_while_saving, 2), (die_while_copying, 1)]
    if "attend_out" in case:
        assert sum(line.get("attacker_won") is not None for line in undisturbed) == updates // ROUND
        kills = [(die_while_saving, 3), (die_while_saving, 2), (die_while_copying, 1)]  # each save: state, checkpoint
    else:
        assert {line["regularized"] for line in undisturbed} == {"0", "1"}
    within_an_epoch = 0
    for _ in range(2):
        printed = kill_after(Job("train", arguments, next(logs)), generator.randint(5, 9), generator)
        within_an_epoch += printed.rfind("begin training epoch") > printed.rfind("end of epoch")
        states = [int(path.stem.rpartition("_")[2]) for path in parts.glob("attn_reg_state_*.pt")]
        within_a_round += max(states, default=0) % ROUND > 0
    assert within_an_epoch
    for how, which in kills:
        kill_while(how, which, arguments, next(logs))
    finished = train(corpus, parts, *flags).check()
    assert len(finished.lines()) < updates and "starts anew" not in finished.output, "it went on"
    assert differing(everything(parts), everything(whole)) == []
    if "attend_out" in case:
        assert within_a_round
        check_game(everything(parts), updates)


@pytest.mark.parametrize(
    ("row", "method"),
    [
        *((row, method) for row in ("rte", "wnut17") for method in ("ad_drop", "attend_out")),
        ("rte", "child_tuning"),
        ("rte", "mixout+child_tuning+hidden_cut+ad_drop+head_drop+layer_drop+attention_dropout"),
    ],
)
def test_a_kill_changes_nothing_of_an_encoder(row: str, method: str, tmp_path: Path) -> None:
    """An epoch has 6 updates."""
    data, encoder = TOYS[row][0](tmp_path / "data"), make_encoder(tmp_path / "encoder")
    driven = ["--attn-reg", method, "--child-tuning-mode", "driven"]
    alone = {"ad_drop": [*AD_DROP, "--ad-drop-cross-tuning", "epoch"], "attend_out": GAME}
    flags = {**alone, "child_tuning": ["--attn-reg", method]}.get(method, driven)
    flags = [*flags, *SAVING, "--max-update", "22"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    undisturbed = Job("train", encoder_arguments(row, data, encoder, whole, *flags), whole / "log").wait().check()
    assert len(undisturbed.lines()) == 22 and undisturbed.lines()[-1]["epoch"] == 4
    arguments, generator = encoder_arguments(row, data, encoder, parts, *flags), random.Random(f"{row} {method}")
    kill_after(Job("train", arguments, parts / "killed.log"), generator.randint(7, 14), generator)
    finished = Job("train", arguments, parts / "log").wait().check()
    assert len(finished.lines()) < 22 and "starts anew" not in finished.output
    assert (everything(whole)["beside"] is not None) == (method not in ("ad_drop", "child_tuning"))
    assert differing(everything(parts), everything(whole)) == []


def test_patience_goes_on_waiting(tmp_path: Path) -> None:
    """Nothing gets better, so a training stops after the first validation and three more; its folder may be moved."""
    data, encoder = TOYS["rte"][0](tmp_path / "data"), make_encoder(tmp_path / "encoder")
    flags = shlex.split("--lr 1e-30 --weight-decay 0 --patience 3 --max-epoch 20")
    save = tmp_path / "save"
    job = Job("train", encoder_arguments("rte", data, encoder, save, *flags), save / "killed.log")
    assert job.wait_until(lambda: updates_of(job) >= 14), job.output()[-2000:]
    job.kill()
    save = save.rename(tmp_path / "moved")
    finished = Job("train", encoder_arguments("rte", data, encoder, save, *flags), save / "log").wait().check()
    assert "hasn't improved for last 3 runs" in finished.output
    assert trained_state(save / "checkpoint_last.pt")["updates"] == 4 * 6
    other = tmp_path / "other"
    start = ["--restore-file", str(save / "checkpoint_best.pt"), "--reset-optimizer", "--reset-dataloader"]
    start += ["--reset-lr-scheduler", "--reset-meters"]
    anew = Job("train", encoder_arguments("rte", data, encoder, other, *flags, *start), other / "log").wait().check()
    assert len(anew.lines("valid")) == 4, "a training that starts from another's weights waits anew"


def test_only_resuming_costs_space(corpus: Path, tmp_path: Path) -> None:
    """With validation: the best and the last checkpoint are as large as a plain training's, states are few."""
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    short = [*GAME, *SAVING, "--max-tokens", "60", "--max-update", "14"]
    train(corpus, plain, *short, "--attn-reg", "none", without=["--disable-validation"]).check()
    train(corpus, ours, *short, without=["--disable-validation"]).check()
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        sizes = [(folder / name).stat().st_size for folder in (ours, plain)]
        assert abs(sizes[0] - sizes[1]) < 0.02 * sizes[1], f"{name}: {sizes}"
    assert {path.name for path in ours.glob("attn_reg_state_*")} == {"attn_reg_state_12.pt", "attn_reg_state_14.pt"}
    assert not list(plain.glob("attn_reg_state_*"))
