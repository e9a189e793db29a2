"""`attn-reg finetune --held-out`, `--label-noise`, `--shortcut`: what fairseq-train reads, and what is reported."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

from fairseq import tasks

from attn_reg_plugin.experiments import runs as runs_module
from attn_reg_plugin.experiments.dry_run import parse_command
from attn_reg_plugin.experiments.methods import select_methods
from attn_reg_plugin.experiments.predicted import file_of
from attn_reg_plugin.experiments.runs import Run
from attn_reg_plugin.tasks.fairseq_settings import FAIRSEQ_SETTINGS
from tests.commands.conftest import fine_tuning_of as parsed

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(*words: str) -> list[Run]:
    return parsed(*words).plan(select_methods("plain"))


def texts_of(run: Run, split: str) -> list[tuple[list[str], int]]:
    """What fairseq-train reads: the first text's words and the label of every example."""
    args = parse_command(run.train_command(), "training")
    vars(args).update({f"attn_{name}": None for name, _ in FAIRSEQ_SETTINGS})  # which fairseq fills in later
    task = tasks.setup_task(args)
    task.load_dataset(split)
    rows = task.dataset(split).rows
    return [(task.tokenizer.decode(row.input_ids).split(" [SEP]")[0].split()[1:], row.label) for row in rows]


def test_what_is_held_out_is_validated_on_and_the_official_set_is_not(rte: list[str]) -> None:
    """The same examples for every method; planted words and wrong labels are in both parts."""
    words = [*rte, "--max-length", "40", "--held-out", "0.25"]
    (clean,), (plain, other) = (
        planned(*words),
        parsed(*words, "--label-noise", "0.5", "--shortcut", "1").plan(select_methods("plain,ad_drop")),
    )
    held_out, trained = texts_of(clean, "valid"), texts_of(clean, "train")
    every = texts_of(planned(*rte, "--max-length", "40")[0], "train")
    assert (len(held_out), len(trained)) == (12, 36) and sorted([*held_out, *trained]) == sorted(every)
    assert texts_of(plain, "valid") == texts_of(other, "valid") and texts_of(plain, "train") == texts_of(other, "train")
    wrong, planted = 0, set()
    for split, before in (("valid", held_out), ("train", trained)):
        after = texts_of(plain, split)
        assert [text[1:] for text, _ in after] == [text for text, _ in before]
        planted |= {(text[0], label) for text, label in after}
        wrong += sum(label != old for (_, label), (_, old) in zip(after, before, strict=True))
    assert wrong == 24 and len(planted) == 2 and len({word for word, _ in planted}) == 2


class Stand:
    """In place of the commands of a run: the log of a training, and predictions that are better with AD-DROP."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], path: Path, *_: Any, **__: Any) -> None:
        """Carry one out."""
        self.commands.append(command)
        folder = path.parent
        if "fairseq_cli.train" in command:
            records = [{"epoch": n, "valid_accuracy": str(50 + n % 2), "valid_num_updates": n} for n in (1, 2, 3, 4)]
            path.write_text("".join(f"x | {json.dumps(record)}\n" for record in records), encoding="utf-8")
            (folder / "checkpoints").mkdir()
            (folder / "checkpoints" / "checkpoint_best.pt").touch()
            return
        right = 14 if "plain" in folder.name else 17
        golds = ["entailment"] * right + ["not_entailment"] * (21 - right)
        file_of(folder, "valid").parent.mkdir()
        lines = ["prediction\tgold", *(f"entailment\t{gold}" for gold in golds)]
        file_of(folder, "valid").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_run_with_held_out_examples_reports_the_official_set(
    rte: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen by the held-out examples, and measured on the validation set once, with what was chosen."""
    runs = parsed(*rte, "--held-out", "0.25", "--shortcut", "0.5", "--seeds", "1,2").plan(
        select_methods("plain,ad_drop")
    )
    stand = Stand()
    monkeypatch.setattr(runs_module, "execute", stand)
    trial = replace(runs[0], folder=tmp_path / "trial", measured=False)
    trial.claim()
    trial.carry_out(lambda log: None)
    assert len(stand.commands) == 1 and trial.finished(), "a trial of a sweep doesn't look at the validation set"
    assert trial.result()["training"]["figures"]["accuracy"] == 51.0 and not trial.scores
    stand.commands.clear()
    for run in runs:
        run.claim()
        run.carry_out(lambda log: None)
    assert len(stand.commands) == 8 and all(run.finished() for run in runs)
    assert runs[0].result()["training"]["best_epoch"] == 3 and runs[0].result()["constant"] == ["valid"], "one class"
    assert runs[0].scores == {"valid": {"accuracy": pytest.approx(100 * 14 / 21)}, "held_out": {"accuracy": 51.0}}
    assert runs[1].scores["valid"] == {"accuracy": pytest.approx(100 * 17 / 21)}
    parsed(*rte, "--held-out", "0.25", "--shortcut", "0.5", "--seeds", "1,2", "--methods", "plain,ad_drop").carry_out()
    table = (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert re.search(r"\| method +\| accuracy +\| accuracy − plain +\| accuracy held out +\|", table)
    assert "each run at its epoch with the best accuracy on the held-out examples" in table
    given = (
        r"training examples: --held-out 0\.25 --shortcut 0\.5 --shortcut-words w\d+,w\d+ --shortcut-at-evaluation none"
    )
    assert re.search(given, table)
    content = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert content["methods"][1]["differences"]["valid"]["accuracy"]["drawn"] == "seeds and examples"
    assert len(stand.commands) == 8, "what is done is not done again"
    checkpoints = runs[0].folder / "checkpoints"
    kept = ["checkpoint_1_5.pt", "attn_reg_state_5.pt", "average_last_1.pt"]
    for name in [*kept, "checkpoint_last.pt", "attn_reg_state_7.pt"]:
        (checkpoints / name).touch()
    runs[0].tidy()
    assert {path.name for path in checkpoints.iterdir()} == {*kept, "checkpoint_best.pt"}, "what was asked for stays"
