"""What came out of a sweep: best against best and mean against mean, from equal numbers of trials."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from attn_reg_plugin.experiments.report.differences import PLAIN, widening
from attn_reg_plugin.experiments.report.table import ENOUGH, Figure, figure_of, markdown, shade, terminal_table
from attn_reg_plugin.experiments.sweep_objective import Objective
from attn_reg_plugin.experiments.sweep_plots import plot_distribution, plot_heat_map
from attn_reg_plugin.experiments.sweep_space import Arm, Dimension, text_of
from attn_reg_plugin.experiments.sweep_study import COMPLETE, FAILED, PRUNED, Entry
from attn_reg_plugin.files import write_json, write_text
from attn_reg_plugin.terminal import say, show

#: names of the pictures in the folder of a sweep
DISTRIBUTION = "distribution.png"
HEAT_MAP = "heat_map-{}-{}.png"
#: resamples of the interval
RESAMPLES = 2000


@dataclass(frozen=True)
class Trial:
    """A trial of the result.

    Attributes:
        arm: its name.
        state: `complete`, `pruned` or `failed`.
        value: the objective at the best epoch; of a pruned trial the best that it had reached; None of a failed one.
        epochs: that were trained, as far as is known.
        folder: its run's.
        attempts: how many times it was started, by whatever process.
    """

    arm: str
    number: int
    seed: int
    values: dict[str, Any]
    state: str
    value: float | None
    epochs: int | None
    folder: str | None
    attempts: int
    error: str | None = None


@dataclass(frozen=True)
class Summary:
    """The trials of an arm that have a value."""

    arm: str
    title: str
    trials: int
    pruned: int
    failed: int
    best: float
    best_values: dict[str, Any]
    best_seed: int
    all: Figure


def trial_of(arm: Arm, entry: Entry, objective: Objective) -> Trial:
    """A slot of a study as a trial of the result."""
    told, epochs = entry.told, max(entry.by_epoch, default=None)
    value = objective.best(entry.by_epoch) if entry.state == PRUNED else entry.value
    if entry.state == COMPLETE:
        epochs = told.get("result", {}).get("training", {}).get("epochs", epochs)
    return Trial(
        arm.name, entry.slot.number, entry.slot.seed, entry.values, entry.state, value, epochs, told.get("folder"),
        entry.attempts, told.get("error") if entry.state == FAILED else None,
    )  # fmt: skip


def interval(values: Sequence[float], others: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """The 95 % interval of the difference of two means, by bootstrap over the trials of either; None below three.

    What is drawn of few trials varies too little, so its deviation is widened, see `widening`, with the degrees of
    freedom of Welch (1947): trials of many settings vary more than those of plain training.
    """
    if min(len(values), len(others)) < 3:
        return None
    draw = random.Random(seed)
    parts = [(statistics.variance(arm) / len(arm), len(arm) - 1) for arm in (values, others)]
    scatter = sum(part**2 / less for part, less in parts)
    freedom = sum(part for part, _ in parts) ** 2 / scatter if scatter else 0.0
    arms = [(arm, statistics.fmean(arm), widening(len(arm), freedom)) for arm in (values, others)]

    def drawn(arm: Sequence[float], mean: float, factor: float) -> float:
        return mean + factor * (statistics.fmean(draw.choices(arm, k=len(arm))) - mean)

    means = sorted(drawn(*arms[0]) - drawn(*arms[1]) for _ in range(RESAMPLES))
    return means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


class Report:
    """The tables and pictures of a sweep."""

    def __init__(self, entries: Sequence[tuple[Arm, Sequence[Entry]]], objective: Objective) -> None:
        """Take the trials of every arm.

        Raises:
            ValueError: in an arm all failed.
        """
        self.arms, self.objective = [arm for arm, _ in entries], objective
        self.trials = {arm.name: [trial_of(arm, one, objective) for one in found] for arm, found in entries}
        self.failed = [trial for trials in self.trials.values() for trial in trials if trial.state == FAILED]
        self.summaries = [self._summary(arm) for arm in self.arms]

    def _summary(self, arm: Arm) -> Summary:
        trials = self.trials[arm.name]
        known = [trial for trial in trials if trial.value is not None]
        if not known:
            raise ValueError(f"every trial of {arm.title} failed: {trials[0].error}")
        best = (max if self.objective.maximize else min)(known, key=lambda trial: trial.value)
        return Summary(
            arm=arm.name,
            title=arm.title,
            trials=len(trials),
            pruned=sum(trial.state == PRUNED for trial in trials),
            failed=sum(trial.state == FAILED for trial in trials),
            best=best.value,
            best_values=best.values,
            best_seed=best.seed,
            all=figure_of([trial.value for trial in known]),
        )

    def values(self, arm: str) -> list[float]:
        """The objective of an arm's trials, of those that have one."""
        return [trial.value for trial in self.trials[arm] if trial.value is not None]

    @property
    def difference(self) -> dict[str, Any] | None:
        """By how much the method is better than plain training; None where plain training is what was searched."""
        if len(self.summaries) < 2:
            return None
        method, plain = self.summaries
        values, others = self.values(method.arm), self.values(plain.arm)
        found = interval(values, others) if self.objective.maximize else interval(others, values)
        gain = self.objective.gain
        return {"best": gain(method.best, plain.best), "mean": gain(method.all.mean, plain.all.mean), "interval": found}

    # -- tables -----------------------------------------------------------------------------------------------------

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: plain training first, then the method, then what it gains."""
        rows = [
            [
                one.title,
                str(one.trials),
                shade(f"{one.best:.3f}", one.trials),
                text_of({**one.best_values, "seed": one.best_seed}),
                one.all.text(3),
                str(one.pruned),
                str(one.failed),
            ]
            for one in reversed(self.summaries)
        ]
        if self.difference:
            found = self.difference["interval"]
            shown = "" if found is None else f" [{found[0]:+.3f}, {found[1]:+.3f}]"
            mean = f"{self.difference['mean']:+.3f}{shown}"
            rows.append(["gain over plain", "", f"{self.difference['best']:+.3f}", "", mean, "", ""])
        return ["", "trials", "best", "which", "mean ± std of all", "pruned", "failed"], rows

    @property
    def notes(self) -> list[str]:
        """What the table shows."""
        better = "higher" if self.objective.maximize else "lower"
        notes = [
            f"{self.objective.metric} on {self.objective.measured_on}, {better} is better; each trial at its best "
            "epoch",
            "best of all trials and mean over all; the best of many tries is high by luck too, so compare it with the "
            "best of as many plain trainings, which differ in the seed",
        ]
        if self.difference and self.difference["interval"]:
            notes.append("[ ]: 95 % interval of the difference of the means, by bootstrap over trials")
        seeds = sorted({trial.seed for trial in self.trials[self.arms[0].name]})
        if self.difference and len(seeds) < 3:
            notes.append(
                f"the method's trials have only the seeds {', '.join(map(str, seeds))}, so their luck is in "
                "its mean, and the interval does not know it; give more `seeds`"
            )
        if any(one.pruned for one in self.summaries):
            notes.append("a pruned trial counts with the best that it had reached; without pruning it may have gained")
        if any(one.trials < ENOUGH for one in self.summaries):
            notes.append(f"in italics, in a terminal grey: fewer than {ENOUGH} trials")
        return notes

    def all_trials(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the trials, the best first."""
        keys = list(dict.fromkeys(dimension.key for arm in self.arms for dimension in arm.dimensions))
        rows, sign = [], -1 if self.objective.maximize else 1
        for arm in self.arms:
            ordered = sorted(self.trials[arm.name], key=lambda one: (one.value is None, sign * (one.value or 0.0)))
            for one in ordered:
                cells = [
                    text_of({key: one.values[key]}).removeprefix(f"{key} ") if key in one.values else "" for key in keys
                ]
                value = "–" if one.value is None else f"{one.value:.3f}"
                epochs = "–" if one.epochs is None else str(one.epochs)
                rows.append([arm.title, *cells, str(one.seed), value, epochs, one.state, one.folder or one.error or ""])
        return ["", *keys, "seed", self.objective.metric, "epochs", "state", "folder"], rows

    # -- what is written --------------------------------------------------------------------------------------------

    def publish(self, console: Console, out: Path) -> None:
        """Write results.json, results.md and the pictures into a folder, and print the table."""
        content = {
            "metric": self.objective.metric,
            "maximize": self.objective.maximize,
            "arms": [asdict(one) for one in self.summaries],
            "gain": self.difference,
            "trials": [asdict(one) for arm in self.arms for one in self.trials[arm.name]],
        }
        write_json(out / "results.json", content)
        write_text(out / "results.md", markdown(*self.table(), self.notes) + "\n" + markdown(*self.all_trials(), []))
        failed = [f"{one.arm} {text_of(one.values)} failed: {one.error}" for one in self.failed]
        show(console, terminal_table(*self.table()), [*self.notes, *failed, f"table: {out / 'results.md'}"])
        try:
            for path in self.draw(out):
                say(console, f"picture: {path}")
        except ValueError as error:
            say(console, f"no pictures: {error}")

    def draw(self, out: Path) -> list[Path]:
        """Draw the distribution, and a heat map if two keys have several numbers each.

        Raises:
            ValueError: matplotlib is missing.
        """
        paths = [out / DISTRIBUTION]
        plot_distribution(self.groups(), self.objective, paths[0])
        axes = self.axes()
        if axes and len(self.arms) > 1:
            paths.append(out / HEAT_MAP.format(axes[0].key, axes[1].key))
            plain = statistics.fmean(self.values(PLAIN))
            title = f"{self.arms[0].title} over the mean of plain"
            plot_heat_map(*axes, self.cells(*axes, plain), title, self.objective.metric, paths[-1])
        return paths

    def axes(self) -> tuple[Dimension, Dimension] | None:
        """The two keys of the heat map: p and q of AD-DROP, else the first two with several numbers."""
        found = [
            dimension
            for dimension in self.arms[0].dimensions
            if len(dimension.values) > 1 and not any(isinstance(value, str | bool) for value in dimension.values)
        ]
        found.sort(key=lambda dimension: "pq".find(dimension.key) if dimension.key in ("p", "q") else 2)
        return (found[0], found[1]) if len(found) > 1 else None

    def cells(self, x: Dimension, y: Dimension, plain: float) -> dict[tuple[Any, Any], tuple[float, bool]]:
        """By two keys' values: the mean gain over plain training, and whether a trial in it was pruned."""
        found: dict[tuple[Any, Any], list[Trial]] = {}
        for one in self.trials[self.arms[0].name]:
            if one.value is not None:
                found.setdefault((one.values[x.key], one.values[y.key]), []).append(one)
        return {
            place: (
                self.objective.gain(statistics.fmean(one.value for one in trials), plain),
                any(one.state == PRUNED for one in trials),
            )
            for place, trials in found.items()
        }

    def groups(self) -> dict[str, list[float]]:
        """Title -> values for the distribution: plain training, and the method by cross-tuning if that varies, else by
        the first key whose values are texts."""
        arm = self.arms[0]
        keys = [one.key for one in arm.dimensions if any(isinstance(value, str) for value in one.values)]
        key = "cross_tuning" if "cross_tuning" in keys else next(iter(keys), None)
        groups = {"plain": self.values(PLAIN)} if len(self.arms) > 1 or key is None else {}
        if arm.name == PLAIN and key is None:
            return groups
        for one in self.trials[arm.name]:
            if one.value is not None:
                title = f"{arm.title}\n{key.replace('_', '-')} {one.values[key]}" if key else arm.title
                groups.setdefault(title, []).append(one.value)
        return groups
