"""The runs in folders: a run of `attn-reg compare` or `finetune`, an output folder of Trainer, or logs of fairseq."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.drop_rates import TRAINER_STATE, newest_trainer_state
from attn_reg_plugin.experiments.report_logs import Figures, figures_of_log, figures_of_trainer
from attn_reg_plugin.experiments.run_settings import flags_of
from attn_reg_plugin.experiments.training_log import read_log
from attn_reg_plugin.files import read_json

#: folders that hold no runs, and how deep runs are looked for
_PASSED_OVER = ("checkpoints", "translations", "data", "bin", "encoder")
DEPTH = 3
#: settings of a run beside its flags that tell methods apart
_RECORDED = ("metric", "attributed", "start", "references", "further", "tokenizer", "schedule")
_SEED = re.compile(r"[-_.]?seed[-_]?(\d+)$")


@dataclass(frozen=True)
class LoggedRun:
    """What is known of one run.

    Attributes:
        method: the name of its method: of its folder, without the seed.
        title: the method's title in tables.
        seed: None where neither folder nor settings say it.
        folder: where it is.
        experiment: what it has in common with those that it is compared with; the last part is the title.
        settings: the settings that shaped it, the seed left out.
        figures: what its log says.
        finished: False where it is known that its training isn't; other folders than ours don't say it.
    """

    method: str
    title: str
    seed: int | None
    folder: Path
    experiment: tuple[str, ...]
    settings: Mapping[str, str]
    figures: Figures
    finished: bool = True


def runs_in(path: Path, depth: int = 0) -> Iterator[LoggedRun]:
    """Every run at `path` or in a folder of it."""
    if path.is_file():
        yield _trainer_run(path) if path.name == TRAINER_STATE else _logged_run(path, [path])
    elif (path / "run.json").is_file() or (path / "result.json").is_file():
        yield _own_run(path)
    elif (state := newest_trainer_state(path)) is not None:
        yield _trainer_run(state, path)
    elif path.is_dir():
        inner = [folder for folder in folders_in(path) if depth < DEPTH]
        found = [run for folder in inner for run in runs_in(folder, depth + 1)]
        logs = [] if found else [log for log in sorted(path.glob("*.log")) if log.is_file()]
        yield from found
        if trainings := _trainings(logs):
            yield from (_logged_run(log, [log]) for log in trainings)
        elif logs and (run := _logged_run(path, logs)).figures.curves:
            yield run


def _trainings(logs: Iterable[Path]) -> list[Path]:
    """Logs in a folder that are of several trainings, of which two begin alike; none if one went on in the next."""
    epochs = {log: [epoch for epoch, _ in read_log(log).validations] for log in logs}
    begun = {log: min(found) for log, found in epochs.items() if found}
    return list(begun) if len(set(begun.values())) < len(begun) else []


def folders_in(path: Path) -> list[Path]:
    """The folders to look into: in the order of the table of a comparison, else by name, numbers by value."""
    order = [str(entry.get("method")) for entry in _rows(published_in(path))]

    def place(folder: Path) -> tuple[Any, ...]:
        method, seed = named(folder.name)
        words = [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", method)]
        return order.index(method) if method in order else len(order), words, seed or 0

    hidden = (".", "__")
    inner = [f for f in path.iterdir() if f.is_dir() and f.name not in _PASSED_OVER and not f.name.startswith(hidden)]
    return sorted(inner, key=place)


def published_in(folder: Path) -> dict[str, Any]:
    """What `results.json` of a comparison holds; empty without one."""
    path = folder / "results.json"
    return read_json(path) if path.is_file() else {}


def _rows(published: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = published.get("methods")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def titles_in(folder: Path) -> dict[str, str]:
    """The titles of the methods by name, as the table in a folder has them; empty without one."""
    return {str(row.get("method")): str(row.get("title")) for row in _rows(published_in(folder))}


def named(name: str) -> tuple[str, int | None]:
    """The method and the seed that the name of a run's folder says."""
    match = _SEED.search(name)
    return (name, None) if match is None or not match.start() else (name[: match.start()], int(match[1]))


def _own_run(folder: Path) -> LoggedRun:
    """A run of `attn-reg compare` or `finetune`, finished or not."""
    settings = read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
    result = read_json(folder / "result.json") if (folder / "result.json").is_file() else {}
    published = published_in(folder.parent)
    method, seed = named(folder.name)
    titles = titles_in(folder.parent)
    pair = published.get("pair")
    task = " → ".join(map(str, pair)) if isinstance(pair, list) and len(pair) == 2 else str(settings.get("task", ""))
    same = tuple(str(settings.get(name, "")) for name in ("task", "data", "model"))
    flags = flags_of(str(settings.get("flags", "")))
    return LoggedRun(
        method=method,
        title=titles.get(method, method),
        seed=settings.get("seed", seed),
        folder=folder,
        experiment=(*same, task.removeprefix("attn_reg_") or folder.parent.name),
        settings={**{name: str(settings[name]) for name in _RECORDED if name in settings}, **flags},
        figures=figures_of_log([folder / "train.log"], result, folder / "checkpoints", "--held-out" in flags),
        finished=not {"training", "evaluation"}.isdisjoint(result),
    )


def _logged_run(path: Path, logs: Iterable[Path]) -> LoggedRun:
    """A training of fairseq of which there are only logs."""
    method, seed = named(path.stem if path.is_file() else path.name)
    where = path.resolve().parent
    return LoggedRun(method, method, seed, path, ("log", str(where), where.name), {}, figures_of_log(logs, {}, path))


def _trainer_run(state: Path, folder: Path | None = None) -> LoggedRun:
    """A training of Trainer."""
    folder = folder or (state.parent.parent if state.parent.name.startswith("checkpoint-") else state.parent)
    figures, settings = figures_of_trainer(state)
    method, seed = named(folder.name)
    where = folder.resolve().parent
    return LoggedRun(method, method, seed, folder, ("Trainer", str(where), where.name), settings, figures)
