"""Draw the complete trials of a sweep by Optuna's plots:

    python pictures.py runs/sweep-rte

`distribution.png` has the distribution of the method's trials and of plain training's; `values.png` the method's trials
by each key, such as with and without cross-tuning (AD-DROP, figure 4); `gain.png` the gain over the mean of plain
training by p and q, else by the first two keys (figure 6).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import optuna
from matplotlib import pyplot
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.visualization import matplotlib as plots


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of a sweep that is done; the pictures go there")
    out = parser.parse_args(words).out
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    values: dict[str, list[float]] = {}  # of the method first, then of plain training
    for trial in found["trials"]:
        values.setdefault(trial["arm"], []).extend([trial["value"]] if trial["value"] is not None else [])
    storage = JournalStorage(JournalFileBackend(str(out / "sweep.journal")))
    studies = [optuna.load_study(study_name=arm, storage=storage) for arm in values]
    keys = sorted(studies[0].best_params, key=lambda key: key not in ("p", "q"))[:2]
    drawn = {"distribution": partial(plots.plot_edf, studies, target_name=found["metric"])}
    if keys:
        drawn["values"] = partial(plots.plot_slice, studies[0], target_name=found["metric"])
    if len(keys) == len(studies) == 2:
        sign, plain = 1 if found["maximize"] else -1, statistics.fmean(values["plain"])
        target = {"target": lambda trial: round(sign * (trial.value - plain), 6)}
        target["target_name"] = f"gain in {found['metric']}"
        drawn["gain"] = partial(plots.plot_contour, studies[0], keys, **target)
    for name, plot in drawn.items():
        with pyplot.style.context("default"):  # Optuna sets a style of its own
            plot()
            pyplot.savefig(out / f"{name}.png", dpi=150)
            pyplot.close()
        print(f"picture: {out / name}.png")


if __name__ == "__main__":
    main()
