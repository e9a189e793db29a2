"""The contract of every method under fairseq: nothing to do is stock training, evaluation is stock, detaching restores,
and a training that is killed ends bit for bit where one that nobody disturbed does."""

import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.fairseq_models import transformer
from tests.comparing import differing
from tests.models.hf_folders import make_encoder, make_rte, make_toy
from tests.regularizers import registered
from tests.tasks.encoder_runs import encoder_arguments, train_encoder
from tests.tasks.fairseq_runs import (
    AD_DROP,
    UPDATES,
    Finished,
    Job,
    generate,
    hypotheses,
    train,
    train_arguments,
    trained_state,
)
from tests.tasks.kills import die_while_copying, die_while_saving, everything, kill_after, kill_while
from tests.tasks.tasks_in_process import attached, criterion, sample, step

pytestmark = pytest.mark.slow

#: AttendOut needs a training; AD-DROP hides whole tokens here, and drops positions in what is killed
METHODS = {name: options for name, options in registered.METHODS.items() if name != "attend_out"}
METHODS["ad_drop"] = tuple({**options, "unit": "token"} for options in METHODS["ad_drop"])


def task_with(method: str, options: dict[str, Any]) -> Any:
    flags = {f"{'attn' if name == 'sites' else method}_{name}": value for name, value in options.items()}
    at_once = {"attn_max_update": 4, "ad_drop_cross_tuning": "off"}
    return attached(transformer(dropout=0.1), attn_reg=method, **{**flags, **at_once})


def stepped(task: Any) -> list[Any]:
    model = task._config.model
    loss, _ = step(task, model, sample())
    return [loss, *(parameter.grad for parameter in model.parameters())]


def evaluated(task: Any) -> list[Any]:
    model = task._config.model
    torch.manual_seed(3)
    loss, size, log = task.valid_step(sample(), model.eval(), criterion())
    return [loss, size, *log.values(), torch.rand(())]


@pytest.mark.parametrize("method", [name for name, (_, idle) in METHODS.items() if idle])
def test_nothing_to_do_is_a_stock_step(method: str) -> None:
    at_work, off = METHODS[method]
    plain = stepped(task_with("none", {}))
    assert differing(stepped(task_with(method, off)), plain) == []
    assert differing(stepped(task_with(method, at_work)), plain)


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_is_stock_and_so_is_the_model_once_detached(method: str) -> None:
    plain, task = task_with("none", {}), task_with(method, METHODS[method][0])
    expected, model = evaluated(plain), task._config.model
    stepped(task)
    assert differing(evaluated(task), expected) == []
    task.regularizer.detach()
    stock = transformer(dropout=0.1)
    assert [type(part) for part in model.modules()] == [type(part) for part in stock.modules()]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert list(model.state_dict()) == list(stock.state_dict())
    task.regularizer = None
    assert differing(stepped(task), stepped(plain)) == []


def logged(finished: Finished) -> list[list[str]]:
    updates = [[line["loss"], line["gnorm"]] for line in finished.lines()]
    return [*updates, *([line["valid_loss"]] for line in finished.lines("valid"))]


NOTHING = (
    "--attn-reg none --ad-drop-p 1 --ad-drop-q 1 --attn-sites *",
    "--attn-reg ad_drop --ad-drop-p 0.5 --ad-drop-q 0.5 --ad-drop-cross-tuning update:8 --attn-sites *",
)


def test_training_without_effect_is_stock_training(stock: Finished, corpus: Path, tmp_path: Path) -> None:
    translations = hypotheses(generate(corpus, stock.checkpoint))
    for number, flags in enumerate(NOTHING):
        folder, ours = tmp_path / str(number), tmp_path / str(number) / "checkpoint_last.pt"
        finished = train(corpus, folder, *shlex.split(flags), *UPDATES, without=["--disable-validation"]).check()
        assert len(finished.losses()) == 8 and len(finished.lines("valid")) == 2
        assert logged(finished) == logged(stock)
        assert differing(trained_state(ours), trained_state(stock.checkpoint)) == []
    assert hypotheses(generate(corpus, ours)) == translations


def test_translating_is_stock_whatever_the_task(regularized: Finished, corpus: Path) -> None:
    expected = hypotheses(generate(corpus, regularized.checkpoint))
    assert len(expected) == 12
    ours = generate(corpus, regularized.checkpoint, *AD_DROP, "--attn-sites", "*", task="attn_reg_translation")
    assert hypotheses(ours) == expected and "DEBUG" not in ours.output


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
        assert sum("attn_reg/attacker_won" in line for line in undisturbed) == updates // ROUND
        kills = [(die_while_saving, 3), (die_while_saving, 2), (die_while_copying, 1)]  # each save: state, checkpoint
    else:
        assert {line.get("attn_reg/regularized") for line in undisturbed} == {None, "1"}
        assert all(("attn_reg/drop_rate" in line) == (line.get("attn_reg/regularized") == "1") for line in undisturbed)
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
        game = everything(parts)["beside"]
        assert within_a_round and game["rounds"] == updates // ROUND and game["in_round"] == updates % ROUND
        assert {batch["update"] for batch in game["cache"]} == set(range(updates % ROUND))


ENCODERS = {
    "ad_drop": [*AD_DROP, "--ad-drop-cross-tuning", "epoch"],
    "attend_out": GAME,
    "several": ["--attn-reg", "r_drop+ad_drop+head_drop+layer_drop+attention_dropout"],
}


@pytest.mark.parametrize(
    ("row", "method"),
    [("rte", "ad_drop"), ("rte", "attend_out"), ("rte", "several"), ("wnut17", "ad_drop"), ("wnut17", "attend_out")],
)
def test_a_kill_changes_nothing_of_an_encoder(row: str, method: str, tmp_path: Path) -> None:
    """An epoch has 6 updates."""
    data, encoder = make_toy(tmp_path / "data", row), make_encoder(tmp_path / "encoder")
    flags = [*ENCODERS[method], *SAVING, "--max-update", "22"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    undisturbed = train_encoder(row, data, encoder, whole, *flags).check()
    assert len(undisturbed.lines()) == 22 and undisturbed.lines()[-1]["epoch"] == 4
    arguments, generator = encoder_arguments(row, data, encoder, parts, *flags), random.Random(f"{row} {method}")
    kill_after(Job("train", arguments, parts / "killed.log"), generator.randint(7, 14), generator)
    finished = train_encoder(row, data, encoder, parts, *flags).check()
    assert len(finished.lines()) < 22 and "starts anew" not in finished.output
    assert (everything(whole)["beside"] is not None) == (method == "attend_out")
    assert differing(everything(parts), everything(whole)) == []


def test_a_killed_training_goes_on_waiting(tmp_path: Path) -> None:
    """Nothing gets better, so it stops after the first validation and three more; its folder may be moved."""
    data, encoder = make_rte(tmp_path / "data"), make_encoder(tmp_path / "encoder")
    flags = shlex.split("--lr 1e-30 --weight-decay 0 --patience 3 --max-epoch 20")
    save = tmp_path / "save"
    kill_after(Job("train", encoder_arguments("rte", data, encoder, save, *flags), save / "log"), 14, random.Random(1))
    save = save.rename(tmp_path / "moved")
    finished = train_encoder("rte", data, encoder, save, *flags).check()
    assert "hasn't improved for last 3 runs" in finished.output
    assert trained_state(save / "checkpoint_last.pt")["updates"] == 4 * 6


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
