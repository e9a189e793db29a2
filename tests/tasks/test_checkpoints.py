"""Checkpoints go both ways between stock fairseq and AD-DROP, and a foreign pickle in one is not run."""

import re
from pathlib import Path

import pytest
import torch

from tests.comparing import differing
from tests.payload import Payload
from tests.tasks.fairseq_runs import AD_DROP, PLUGIN, Finished, generate, read_checkpoint, run, train, trained_state

pytestmark = pytest.mark.slow
RESET = ["--reset-optimizer", "--reset-dataloader", "--reset-meters", "--reset-lr-scheduler"]
#: one update that moves no weight
STAND_STILL = ["--max-update", "1", "--lr", "1e-30"]


def model_of(path: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(path)["model"]


def test_it_is_a_plain_one_but_for_the_tasks_state(regularized: Finished, stock: Finished) -> None:
    ours, theirs = read_checkpoint(regularized.checkpoint), read_checkpoint(stock.checkpoint)
    shapes = [{name: value.shape for name, value in each["model"].items()} for each in (ours, theirs)]
    assert ours.keys() == theirs.keys() and shapes[0] == shapes[1]
    state = ours["task_state"]
    assert state.pop("attn_reg") == {"method": "ad_drop", "epoch": 2, "updates": 8}
    assert state.pop("attn_reg_first_epoch") == 6  # batches
    assert state == theirs["task_state"]


@pytest.mark.parametrize(("how", "updates"), [("--finetune-from-model", "1"), ("--restore-file", "9")])
def test_starting_from_a_stock_model(how: str, updates: str, stock: Finished, corpus: Path, tmp_path: Path) -> None:
    reset = RESET if how == "--restore-file" else []
    flags = [*AD_DROP, how, str(stock.checkpoint), *reset, *STAND_STILL, "--max-update", updates, "--max-epoch", "1"]
    finished = train(corpus, tmp_path, *flags).check()
    assert {(line["attn_reg/regularized"], line["epoch"]) for line in finished.lines()} == {("1", 1)}
    assert differing(model_of(tmp_path / "checkpoint_last.pt"), model_of(stock.checkpoint)) == []
    assert float(finished.losses()[0]) < float(stock.losses()[0]) - 0.5


def test_going_on_under_the_stock_task_is_going_on_unregularized(
    regularized: Finished, corpus: Path, tmp_path: Path
) -> None:
    for task in ("translation", "attn_reg_translation"):
        # from its first batch: our task goes on with an undisturbed run's batches, which fairseq's own does not
        flags = ["--restore-file", str(regularized.checkpoint), "--reset-dataloader", "--max-update", "10"]
        train(corpus, tmp_path / task, *flags, task=task).check()
    states = [trained_state(tmp_path / task / "checkpoint_last.pt") for task in ("translation", "attn_reg_translation")]
    assert differing(*states) == []


@pytest.mark.parametrize("how", ["--restore-file", "--finetune-from-model", "fairseq-generate"])
def test_a_foreign_pickle_is_refused_and_not_run(how: str, stock: Finished, corpus: Path, tmp_path: Path) -> None:
    checkpoint, marker, path = read_checkpoint(stock.checkpoint), tmp_path / "marker", tmp_path / "poisoned.pt"
    checkpoint["extra_state"]["payload"] = Payload(marker)
    torch.save(checkpoint, path)
    if how == "fairseq-generate":
        finished = generate(corpus, path)
    else:
        finished = train(corpus, tmp_path / "save", *AD_DROP, how, str(path), "--max-update", "9")
    assert finished.status not in (0, None)
    assert not marker.exists()
    assert re.search(r"Weights only load failed|not allowed|refused", finished.output)
    assert "posix.mkdir" in finished.output, "the message names what was refused"
    torch.load(path, weights_only=bool(0))
    assert marker.is_dir(), "it would run if it were let"


def test_reading_needs_the_plugin_only(stock: Finished, corpus: Path, tmp_path: Path) -> None:
    """Without `--user-dir`, torch refuses fairseq's own checkpoints: why the README asks for it."""
    arguments = [str(corpus), "--path", str(stock.checkpoint), "--cpu", "--num-workers", "0"]
    assert "Weights only load failed" in run("generate", arguments, tmp_path / "without.log").output
    run("generate", [*arguments, "--user-dir", PLUGIN], tmp_path / "with.log").check()


def test_nothing_in_the_package_reads_a_checkpoint_unsafely() -> None:
    unsafe = re.compile(r"weights_only\s*=\s*False|NO_WEIGHTS_ONLY_LOAD|FORCE_WEIGHTS_ONLY|pickle\.loads?\(|Unpickler")
    found = [str(path) for path in Path(PLUGIN).rglob("*.py") if unsafe.search(path.read_text(encoding="utf-8"))]
    assert found == []
