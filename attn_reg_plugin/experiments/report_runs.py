"""The runs that a report is about: what fairseq's and Trainer's logs say, gathered by experiment and method.

A run is a folder of `attn-reg compare` or `finetune`, an output folder of Trainer (`trainer_state.json`), or a log of
fairseq-train with `--log-format json`. Runs on the same task, data and start belong to one experiment. Those of one
method that differ in the seed alone are averaged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.drop_rates import TRAINER_STATE, Rates
from attn_reg_plugin.experiments.report_logs import Figures, figures_of_log, figures_of_trainer, flags_of
from attn_reg_plugin.files import read_json

#: folders that hold no runs, and how deep runs are looked for
_PASSED_OVER = ("checkpoints", "translations", "data", "bin", "encoder")
DEPTH = 3
#: settings that follow from others
_FOLLOWING = ("--total-num-update", "--warmup-updates", "--lr-period-updates", "--patience")
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
    """

    method: str
    title: str
    seed: int | None
    folder: Path
    experiment: tuple[str, ...]
    settings: Mapping[str, str]
    figures: Figures


@dataclass(frozen=True)
class Group:
    """A method: its runs, which differ in the seed alone."""

    title: str
    method: str
    runs: tuple[LoggedRun, ...]

    def values(self, score: str) -> dict[Any, float]:
        """A score by seed, of the runs that have it; runs without a seed are told apart by their folders."""
        return {
            run.folder if run.seed is None else run.seed: run.figures.scores[score]
            for run in self.runs
            if score in run.figures.scores
        }

    def curves(self, name: str) -> list[Mapping[float, float]]:
        """A curve of each run that has it."""
        return [run.figures.curves[name] for run in self.runs if run.figures.curves.get(name)]

    @property
    def rates(self) -> tuple[LoggedRun, Mapping[str, Rates]] | None:
        """The first run that logged drop rates, and these."""
        return next(((run, run.figures.rates) for run in self.runs if run.figures.rates), None)

    @property
    def seconds(self) -> list[float]:
        """Seconds per epoch of the runs that know them."""
        return [run.figures.seconds for run in self.runs if run.figures.seconds is not None]

    @property
    def settings(self) -> Mapping[str, str]:
        """What all its runs have in common."""
        return self.runs[0].settings


@dataclass(frozen=True)
class Experiment:
    """Methods on the same task and data, and one baseline.

    Attributes:
        title: such as `en → ro` or `rte`.
        groups: the methods, in the order of their table.
            baseline: the group that the others are compared with, if it is there.
        published: what `results.json` of the comparison holds; empty for other runs.
    """

    title: str
    groups: tuple[Group, ...]
    baseline: Group | None
    published: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> list[str]:
        """The names of what the runs are compared by, the chief one first."""
        return list(dict.fromkeys(name for group in self.groups for run in group.runs for name in run.figures.scores))

    @cached_property
    def differences(self) -> dict[int, dict[str, Compared]]:
        """How each group differs from the baseline, by the group's `id` and the score; empty without a baseline."""
        from attn_reg_plugin.experiments.report_differences import Differences

        baseline, reader = self.baseline, Differences()
        others = [group for group in self.groups if group is not baseline]
        return {} if baseline is None else {id(group): _of_group(group, baseline, reader) for group in others}

    @property
    def curves(self) -> list[str]:
        """The names of the curves that any run has."""
        return list(dict.fromkeys(name for group in self.groups for run in group.runs for name in run.figures.curves))


@dataclass(frozen=True)
class Compared:
    """How a group differs from the baseline in a score.

    Attributes:
        values: the differences of runs with the same seed.
        interval: the ends of the 95 % interval of their mean; None of one seed without examples.
        drawn: what the interval's bootstrap drew, such as `seeds and examples`.
    """

    values: tuple[float, ...]
    interval: tuple[float, float] | None = None
    drawn: str = ""


def compared(experiment: Experiment, group: Group, score: str) -> Compared | None:
    """The differences of a group to the baseline; None where no seed is in both, and of the baseline itself."""
    return experiment.differences.get(id(group), {}).get(score)


def _of_group(group: Group, baseline: Group, reader: Any) -> dict[str, Compared]:
    """The differences of a group, by score."""
    theirs = {run.seed: run for run in baseline.runs if run.seed is not None}
    pairs = [(run, theirs[run.seed]) for run in group.runs if run.seed in theirs]
    return {
        score: Compared(tuple(values), None if None in ends else ends, found.drawn)
        for score, (values, found) in reader.of(pairs).items()
        for ends in [(found.low, found.high)]
    }


def read_experiments(paths: Sequence[Path], baseline: str = "plain") -> list[Experiment]:
    """The experiments that the runs in `paths` belong to.

    Args:
        paths: runs, or folders with runs in them.
        baseline: name or title of the method that others are compared with.

    Raises:
        FileNotFoundError: a path that isn't there.
        ValueError: a path without a run, or a file of a run that cannot be read.
    """
    runs: dict[Path, LoggedRun] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no run {path}")
        found = {run.folder.resolve(): run for run in _runs(path)}
        if not found:
            raise ValueError(
                f"{path} holds no run: neither run.json of attn-reg, nor {TRAINER_STATE} of Trainer, nor a log of "
                "fairseq-train with --log-format json"
            )
        runs |= found
    experiments: dict[tuple[str, ...], list[LoggedRun]] = {}
    for run in runs.values():
        experiments.setdefault(run.experiment, []).append(run)
    return [one for key, members in experiments.items() for one in _parted(_experiment(key, members), baseline)]


def _parted(experiment: Experiment, baseline: str) -> list[Experiment]:
    """The experiment with its baseline; one for each where several differ in settings, as in the number of examples.

    Every other group goes to the baseline with which it shares the most settings, the first of equals.
    """
    by_settings: dict[frozenset[tuple[str, str]], Group] = {}
    for group in experiment.groups:
        if baseline in (group.method, group.title):
            by_settings.setdefault(frozenset(group.settings.items()), group)
    chosen = list(by_settings.values())
    if len(chosen) < 2:
        return [replace(experiment, baseline=chosen[0] if chosen else None)]
    shared = frozenset.intersection(*by_settings)
    parts: dict[int, list[Group]] = {id(base): [] for base in chosen}
    for group in experiment.groups:
        alike = [len(set(base.settings.items()) & set(group.settings.items())) for base in chosen]
        nearest = group if group in chosen else chosen[alike.index(max(alike))]
        parts[id(nearest)].append(group)
    return [
        replace(experiment, title=_with_settings(experiment.title, base, shared), groups=tuple(groups), baseline=base)
        for base, groups in zip(chosen, parts.values(), strict=True)
    ]


def _with_settings(title: str, base: Group, shared: frozenset[tuple[str, str]]) -> str:
    """A title with the settings that the other baselines haven't got."""
    told = [(name, value) for name, value in base.settings.items() if name not in _FOLLOWING]
    own = " ".join(f"{name} {value}".strip() for name, value in told if (name, value) not in shared)
    return f"{title} ({own})" if own else title


def _experiment(key: tuple[str, ...], runs: Sequence[LoggedRun]) -> Experiment:
    published = next((found for run in runs if (found := _published(run.folder.parent))), {})
    alike: list[tuple[LoggedRun, list[LoggedRun]]] = []
    for run in runs:
        for first, members in alike:
            same = (first.method, first.title, first.settings) == (run.method, run.title, run.settings)
            if same and run.seed not in [member.seed for member in members]:
                members.append(run)
                break
        else:
            alike.append((run, [run]))
    titles = _titles([first for first, _ in alike])
    groups = [
        Group(title, first.method, tuple(sorted(members, key=lambda run: run.seed or 0)))
        for title, (first, members) in zip(titles, alike, strict=True)
    ]
    return Experiment(key[-1], tuple(groups), None, published)


def _titles(runs: Sequence[LoggedRun]) -> list[str]:
    """The title of each method, of its first run; where several have the same, with as much of a path as differs.

    The path is that of the folder of the experiment, or of the run where two lie in one folder.
    """
    found = [run.title for run in runs]
    for title in dict.fromkeys(found):
        same = [place for place, run in enumerate(runs) if run.title == title]
        folders = [runs[place].folder.resolve() for place in same]
        parents = [folder.parent for folder in folders]
        paths = parents if len(set(parents)) == len(parents) else folders
        for count in range(1, max(len(path.parts) for path in paths) + 1) if len(same) > 1 else ():
            endings = ["/".join(path.parts[-count:]) for path in paths]
            if len(set(endings)) == len(endings):
                for place, ending in zip(same, endings, strict=True):
                    found[place] = f"{title} ({ending})"
                break
    return found


def _runs(path: Path, depth: int = 0) -> Iterator[LoggedRun]:
    """Every run at `path` or in a folder of it."""
    if path.is_file():
        yield _trainer_run(path) if path.name == TRAINER_STATE else _logged_run(path, [path])
    elif (path / "run.json").is_file() or (path / "result.json").is_file():
        yield _own_run(path)
    elif (state := _trainer_state(path)) is not None:
        yield _trainer_run(state, path)
    elif path.is_dir():
        inner = [folder for folder in folders_in(path) if depth < DEPTH]
        found = [run for folder in inner for run in _runs(folder, depth + 1)]
        logs = [] if found else [log for log in sorted(path.glob("*.log")) if log.is_file()]
        yield from found
        if logs and (run := _logged_run(path, logs)).figures.curves:
            yield run


def folders_in(path: Path) -> list[Path]:
    """The folders to look into: in the order of the table of a comparison, else by name, numbers by value."""
    order = [str(entry.get("method")) for entry in _rows(_published(path))]

    def place(folder: Path) -> tuple[Any, ...]:
        method, seed = named(folder.name)
        words = [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", method)]
        return order.index(method) if method in order else len(order), words, seed or 0

    hidden = (".", "__")
    inner = [f for f in path.iterdir() if f.is_dir() and f.name not in _PASSED_OVER and not f.name.startswith(hidden)]
    return sorted(inner, key=place)


def _published(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    return read_json(path) if path.is_file() else {}


def _rows(published: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = published.get("methods")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def titles_in(folder: Path) -> dict[str, str]:
    """The titles of the methods by name, as the table in a folder has them; empty without one."""
    return {str(row.get("method")): str(row.get("title")) for row in _rows(_published(folder))}


def named(name: str) -> tuple[str, int | None]:
    """The method and the seed that the name of a run's folder says."""
    match = _SEED.search(name)
    return (name, None) if match is None or not match.start() else (name[: match.start()], int(match[1]))


def _own_run(folder: Path) -> LoggedRun:
    """A run of `attn-reg compare` or `finetune`, finished or not."""
    settings = read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
    result = read_json(folder / "result.json") if (folder / "result.json").is_file() else {}
    published = _published(folder.parent)
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
        settings=flags,
        figures=figures_of_log([folder / "train.log"], result, folder / "checkpoints", "--held-out" in flags),
    )


def _logged_run(path: Path, logs: Iterable[Path]) -> LoggedRun:
    """A training of fairseq of which there are only logs."""
    method, seed = named(path.stem if path.is_file() else path.name)
    where = path.resolve().parent
    return LoggedRun(method, method, seed, path, ("log", str(where), where.name), {}, figures_of_log(logs, {}, path))


def _trainer_state(folder: Path) -> Path | None:
    """The newest state of a training of Trainer: its own at the end, or that of its last checkpoint."""
    if (folder / TRAINER_STATE).is_file():
        return folder / TRAINER_STATE
    states = [path for path in folder.glob(f"checkpoint-*/{TRAINER_STATE}") if path.parent.name[11:].isdecimal()]
    return max(states, key=lambda path: int(path.parent.name[11:]), default=None)


def _trainer_run(state: Path, folder: Path | None = None) -> LoggedRun:
    """A training of Trainer."""
    folder = folder or (state.parent.parent if state.parent.name.startswith("checkpoint-") else state.parent)
    figures, settings = figures_of_trainer(state)
    method, seed = named(folder.name)
    where = folder.resolve().parent
    return LoggedRun(method, method, seed, folder, ("Trainer", str(where), where.name), settings, figures)
