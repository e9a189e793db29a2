"""The runs that a report is about: what fairseq's and Trainer's logs say, gathered by experiment and method.

A run is a folder of `attn-reg compare` or `finetune`, an output folder of Trainer (`trainer_state.json`), or a log of
fairseq-train with `--log-format json`. Runs on the same task, data and start belong to one experiment. Those of one
method that differ in the seed alone are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.drop_rates import TRAINER_STATE, Rates
from attn_reg_plugin.experiments.report_folders import LoggedRun, published_in, runs_in
from attn_reg_plugin.experiments.run_settings import differing

#: settings that follow from others
_FOLLOWING = ("--total-num-update", "--warmup-updates", "--lr-period-updates", "--patience")


@dataclass(frozen=True)
class Group:
    """A method: its runs, which differ in the seed alone."""

    title: str
    method: str
    runs: tuple[LoggedRun, ...]

    @property
    def counted(self) -> tuple[LoggedRun, ...]:
        """The runs that its figures are of: those that are finished, or all if none is."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    def values(self, score: str) -> dict[Any, float]:
        """A score by seed, of the runs that have it; runs without a seed are told apart by their folders."""
        return {
            run.folder if run.seed is None else run.seed: run.figures.scores[score]
            for run in self.counted
            if score in run.figures.scores
        }

    def curves(self, name: str) -> list[Mapping[float, float]]:
        """A curve of each run that has it."""
        return [run.figures.curves[name] for run in self.counted if run.figures.curves.get(name)]

    @property
    def rates(self) -> tuple[LoggedRun, Mapping[str, Rates]] | None:
        """The first run that logged drop rates, and these."""
        return next(((run, run.figures.rates) for run in self.counted if run.figures.rates), None)

    @property
    def seconds(self) -> list[float]:
        """Seconds per epoch of the runs that know them."""
        return [run.figures.seconds for run in self.counted if run.figures.seconds is not None]

    @property
    def settings(self) -> Mapping[str, str]:
        """What all its runs have in common."""
        shared = set.intersection(*(set(run.settings.items()) for run in self.runs))
        return {name: value for name, value in self.runs[0].settings.items() if (name, value) in shared}


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
        return list(
            dict.fromkeys(name for group in self.groups for run in group.counted for name in run.figures.scores)
        )

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
        return list(
            dict.fromkeys(name for group in self.groups for run in group.counted for name in run.figures.curves)
        )


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
    theirs = {run.seed: run for run in baseline.counted if run.seed is not None}
    pairs = [(run, theirs[run.seed]) for run in group.counted if run.seed in theirs]
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
        found = {run.folder.resolve(): run for run in runs_in(path)}
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
    chosen: list[Group] = []
    for group in experiment.groups:
        named = baseline in (group.method, group.title)
        if named and all(differing(other.settings, group.settings) for other in chosen):
            chosen.append(group)
    if len(chosen) < 2:
        return [replace(experiment, baseline=chosen[0] if chosen else None)]
    shared = frozenset.intersection(*(frozenset(base.settings.items()) for base in chosen))
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
    published = next((found for run in runs if (found := published_in(run.folder.parent))), {})
    alike: list[tuple[LoggedRun, list[LoggedRun]]] = []
    for run in runs:
        for first, members in alike:
            same = (first.method, first.title) == (run.method, run.title)
            if same and not any(one.seed == run.seed or differing(one.settings, run.settings) for one in members):
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
