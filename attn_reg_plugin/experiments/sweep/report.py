"""The result of a sweep: best against best and mean against mean, from equal numbers of trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console

from attn_reg_plugin.experiments.report.table import figure_of, markdown, shade, terminal_table
from attn_reg_plugin.experiments.running.flags import PLAIN
from attn_reg_plugin.experiments.sweep.settings import TRIAL, text_of
from attn_reg_plugin.files import read_json, write_json, write_text
from attn_reg_plugin.terminal import show

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.sweep.settings import Arm

HEADER = ["", "trials", "best", "which", "mean ± std of all", "pruned", "failed"]


def frame_of(out: Path, arm: Arm, maximize: bool) -> pd.DataFrame:
    """The trials of an arm in a folder, a row per trial, the best first; those of a longer sweep are left out."""
    trials = [one for path in out.glob(f"*/{TRIAL}") if (one := read_json(path))["arm"] == arm.name]
    trials = [one for one in trials if one["trial"] < len(arm.trials)]
    columns = dict.fromkeys(["arm", "trial", "value", *arm.space, "seed", "folder", "error", "state", "epochs"])
    frame = pd.DataFrame([{**one, **one["values"]} for one in trials]).reindex(columns=list(columns))
    return frame.astype({"value": float}).sort_values(["value", "trial"], ascending=[not maximize, True])


def gain(method: pd.Series, plain: pd.Series) -> dict[str, Any]:
    """By how much the values of the method are higher, with a 95 % interval of the means (Welch 1947)."""
    from scipy.stats import ttest_ind

    mean, interval = method.mean() - plain.mean(), None
    if method.var() + plain.var() == 0:
        interval = [mean, mean]
    elif min(len(method), len(plain)) > 2:
        interval = [float(end) for end in ttest_ind(method, plain, equal_var=False).confidence_interval()]
    return {"best": method.max() - plain.max(), "mean": mean, "interval": interval}


def row_of(own: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """The row of an arm in the table; a ValueError says that all trials failed."""
    name, best, ended = own["arm"].iloc[0], own.iloc[0], own["state"].value_counts()
    if own["value"].isna().all():
        raise ValueError(f"every trial of {name} failed: {best['error']}")
    cells = [name, str(len(own)), shade(f"{best['value']:.3f}", len(own)), text_of({key: best[key] for key in keys})]
    return [*cells, figure_of(own["value"].dropna()).text(3), *(str(ended.get(one, 0)) for one in ("pruned", "fail"))]


def publish(out: Path, arms: Sequence[Arm], metric: str, maximize: bool, console: Console) -> bool:
    """Write results.json and results.md, and print the table; False where a trial failed."""
    frames, found = [frame_of(out, arm, maximize) for arm in arms], None
    body = [row_of(own, [*arm.space, "seed"]) for arm, own in zip(arms, frames, strict=True)][::-1]
    notes = [
        f"{metric} on the examples that checkpoints are chosen by, {'higher' if maximize else 'lower'} is better; each "
        "trial at its best epoch, a pruned trial at the best that it had reached",
        "the best of many tries is high by luck too, so it is compared with that of as many seeds of plain training",
        "[ ]: 95 % interval of the difference of the means (Welch)",
    ]
    if len(arms) > 1:
        found = gain(*(own["value"].dropna() * (1 if maximize else -1) for own in frames))
        ends = " [{:+.3f}, {:+.3f}]".format(*found["interval"]) if found["interval"] else ""
        body.append([f"gain over {PLAIN}", "", f"{found['best']:+.3f}", "", f"{found['mean']:+.3f}{ends}", "", ""])
        if len(seeds := sorted(set(frames[0]["seed"]))) < 3:
            said = f"the method has only the seeds {', '.join(map(str, seeds))}, whose luck the interval does not know"
            notes.append(f"{said}; give more `seeds`")
    every = pd.concat(frames, ignore_index=True).astype(object)
    trials = every.where(every.notna(), None).to_dict("records")
    write_json(out / "results.json", {"metric": metric, "maximize": maximize, "gain": found, "trials": trials})
    table = every.drop(columns="trial").fillna("").to_markdown(index=False)
    write_text(out / "results.md", markdown(HEADER, body, notes) + "\n" + table + "\n")
    said = [f"{one['folder'] or one['arm']} failed: {one['error']}" for one in trials if one["state"] == "fail"]
    show(console, terminal_table(HEADER, body), [*notes, *said, f"table: {out / 'results.md'}"])
    return not said
