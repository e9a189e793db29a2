"""The result of a sweep: best against best and mean against mean, from equal numbers of trials, and its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from optuna.distributions import CategoricalDistribution
from optuna.study import StudyDirection
from rich.console import Console

from attn_reg_plugin.experiments.sweep.settings import text_of
from attn_reg_plugin.experiments.sweep.trials import PLAIN, Arm, standing
from attn_reg_plugin.experiments.table import ENOUGH, figure_of, markdown, shade, terminal_table
from attn_reg_plugin.files import write_json, write_text
from attn_reg_plugin.pictures import load_matplotlib, save
from attn_reg_plugin.terminal import show


def frame_of(studies: Sequence[optuna.Study], arms: Sequence[Arm]) -> pd.DataFrame:
    """The trials of a sweep, a row per trial, the best of each arm first; of a pruned trial the best value it had."""
    frames = []
    for study, arm in zip(studies, arms, strict=True):
        maximize, rows = study.direction == StudyDirection.MAXIMIZE, []
        for number, trial in standing(study).items():
            reached = (max if maximize else min)(trial.intermediate_values.values(), default=None)
            value = reached if trial.state.name == "PRUNED" else trial.value
            about = {"value": value, "epochs": trial.last_step, "state": trial.state.name.lower()}
            about |= {key: trial.user_attrs.get(key) for key in ("folder", "error")}
            rows.append({"arm": arm.name, "trial": number, **trial.params, "seed": trial.user_attrs["seed"], **about})
        frames.append(pd.DataFrame(rows).astype({"value": float}).sort_values("value", ascending=not maximize))
    return pd.concat(frames, ignore_index=True)


def gain_of(arms: Mapping[str, pd.DataFrame], maximize: bool) -> dict[str, Any]:
    """By how much the method is better than plain training, with a 95 % interval of the means (Welch 1947).

    Args:
        arms: the trials of the method and of plain training.
    """
    from scipy.stats import ttest_ind

    sign = 1 if maximize else -1
    method, plain = (sign * own["value"].dropna() for own in arms.values())
    enough = min(len(method), len(plain)) > 2
    ends = ttest_ind(method, plain, equal_var=False).confidence_interval() if enough else None
    found = {"best": method.max() - plain.max(), "mean": method.mean() - plain.mean()}
    return found | {"interval": [float(end) for end in ends] if ends else None}


def publish(out: Path, studies: Sequence[optuna.Study], arms: Sequence[Arm], metric: str, console: Console) -> bool:
    """Write results.json, results.md and the pictures, and print the table; False where a trial failed.

    Raises:
        ValueError: all trials of an arm failed.
    """
    trials, maximize = frame_of(studies, arms), studies[0].direction == StudyDirection.MAXIMIZE
    by_arm = {arm.name: trials[trials["arm"] == arm.name] for arm in arms}
    body, failed = [], trials[trials["state"] == "fail"]
    for arm in reversed(arms):
        own = by_arm[arm.name]
        if own["value"].isna().all():
            raise ValueError(f"every trial of {arm.name} failed: {own['error'].iloc[0]}")
        best, counts = own.iloc[0], own["state"].value_counts()
        which = text_of({key: best[key] for key in [*arm.space, "seed"]})
        cells = [arm.name, str(len(own)), shade(f"{best['value']:.3f}", len(own)), which]
        cells.append(figure_of(list(own["value"].dropna())).text(3))
        body.append([*cells, str(counts.get("pruned", 0)), str(counts.get("fail", 0))])
    gain = gain_of(by_arm, maximize) if len(arms) == 2 else None
    if gain:
        ends = f" [{gain['interval'][0]:+.3f}, {gain['interval'][1]:+.3f}]" if gain["interval"] else ""
        body.append([f"gain over {PLAIN}", "", f"{gain['best']:+.3f}", "", f"{gain['mean']:+.3f}{ends}", "", ""])
    table = ["", "trials", "best", "which", "mean ± std of all", "pruned", "failed"], body
    notes = _notes(trials, arms, metric, maximize)
    records = trials.astype(object).where(trials.notna(), None).to_dict("records")
    write_json(out / "results.json", {"metric": metric, "maximize": maximize, "gain": gain, "trials": records})
    every = trials.drop(columns="trial").fillna("").to_markdown(index=False)
    write_text(out / "results.md", markdown(*table, notes) + "\n" + every + "\n")
    said = [f"{one.folder or one.arm} failed: {one.error}" for one in failed.itertuples()]
    try:
        said += [f"picture: {path}" for path in draw(out, studies, arms, trials, metric)]
    except ValueError as error:
        said.append(f"no pictures: {error}")
    show(console, terminal_table(*table), [*notes, *said, f"table: {out / 'results.md'}"])
    return failed.empty


def _notes(trials: pd.DataFrame, arms: Sequence[Arm], metric: str, maximize: bool) -> list[str]:
    notes = [
        f"{metric} on what checkpoints are chosen by, {'higher' if maximize else 'lower'} is better; each trial at its "
        "best epoch",
        "the best of many tries is high by luck too, so compare it with the best of as many plain trainings, which "
        "differ in the seed",
    ]
    seeds = sorted(set(trials.loc[trials["arm"] == arms[0].name, "seed"]))
    if len(arms) > 1:
        notes.append("[ ]: 95 % interval of the difference of the means (Welch)")
        if len(seeds) < 3:
            notes.append(
                f"the trials of {arms[0].name} have only the seeds {', '.join(map(str, seeds))}, so their luck is in "
                "its mean, and the interval does not know it; give more `seeds`"
            )
    if (trials["state"] == "pruned").any():
        notes.append("a pruned trial counts with the best that it had reached; without pruning it may have gained")
    return [*notes, f"in italics, in a terminal grey: fewer than {ENOUGH} trials"]


def draw(
    out: Path, studies: Sequence[optuna.Study], arms: Sequence[Arm], trials: pd.DataFrame, metric: str
) -> list[Path]:
    """Draw the distribution of the trials (AD-DROP, figure 4) and, by two keys with numbers, the gain (figure 6).

    Raises:
        ValueError: matplotlib is missing.
    """
    load_matplotlib("the picture")
    from matplotlib import pyplot

    lists = {key: one.choices for key, one in arms[0].space.items() if isinstance(one, CategoricalDistribution)}
    texts = [key for key, values in lists.items() if any(isinstance(value, str) for value in values)]
    numbers = [key for key, values in lists.items() if len(values) > 1 and key not in texts and True not in values]
    numbers.sort(key=lambda key: key not in ("p", "q"))
    paths = [out / "distribution.png"]
    with pyplot.style.context("default"):  # Optuna sets a style of its own
        panel = optuna.visualization.matplotlib.plot_edf(_grouped(studies, arms, texts), target_name=metric)
        panel.set_title("share of the trials up to a value")
        save(panel.figure, paths[0])
        if len(numbers) > 1 and len(arms) > 1:
            paths.append(out / f"heat_map-{numbers[0]}-{numbers[1]}.png")
            sign = 1 if studies[0].direction == StudyDirection.MAXIMIZE else -1
            means = trials[trials["arm"] == arms[0].name].pivot_table("value", numbers[1], numbers[0])
            gains = sign * (means - trials.loc[trials["arm"] == PLAIN, "value"].mean())
            save(_heat_map(gains, f"gain in {metric} over the mean of {PLAIN}"), paths[1])
        pyplot.close("all")
    return paths


def _grouped(studies: Sequence[optuna.Study], arms: Sequence[Arm], texts: Sequence[str]) -> list[optuna.Study]:
    """The trials of each arm; of the method those of each value of a text, such as with and without cross-tuning."""
    found: dict[str, optuna.Study] = {}
    for study, arm in zip(studies, arms, strict=True):
        for trial in standing(study).values():
            title = ", ".join([arm.name, *(f"{key} {trial.params[key]}" for key in texts[:1] if key in trial.params)])
            if title not in found:
                found[title] = optuna.create_study(study_name=title, direction=study.direction)
            found[title].add_trial(trial)
    return list(found.values())


def _heat_map(cells: pd.DataFrame, title: str) -> Any:
    """A figure with a cell per pair of values, colored around 0 and with its number."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(layout="constrained", figsize=(3 + 0.6 * len(cells.columns), 2 + 0.45 * len(cells)))
    largest = float(np.nanmax(np.abs(cells)))
    image = panel.imshow(cells, cmap="viridis", vmin=-largest, vmax=largest, origin="lower", aspect="auto")
    for (row, column), gain in np.ndenumerate(cells.to_numpy()):
        color = "white" if gain <= 0.25 * largest else "black"
        panel.text(column, row, f"{gain:+.3g}", ha="center", va="center", color=color, fontsize="small")
    panel.set_xticks(range(len(cells.columns)), [f"{value:g}" for value in cells.columns])
    panel.set_yticks(range(len(cells)), [f"{value:g}" for value in cells.index])
    panel.set(xlabel=cells.columns.name, ylabel=cells.index.name)
    panel.set_title(title, fontsize="medium")
    figure.colorbar(image, ax=panel)
    return figure
