"""Fit a schedule of scheduled dropout to the drop rates that a training logged, such as AttendOut's:

    python fit_schedule.py runs/demo/attend_out-seed1/train.log --out learned.txt --plot learned.png
    python fit_schedule.py results/checkpoint-500/trainer_state.json --out learned.txt --knots 5

The log is that of fairseq-train with `--log-format json --attn-rates-by-site`, or the `trainer_state.json` of a Trainer
whose method has `rates_by_site=True`. AttendOut learns how much to drop in which layer and when; scheduled dropout
repeats that at the cost of plain training. The plot is the paper's figure 3, with the curves dotted.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from attn_reg_plugin.attention.selection import SiteSelector
from attn_reg_plugin.experiments.running.training_log import finite, record_of
from attn_reg_plugin.regularizers.base.schedule import Curve
from attn_reg_plugin.regularizers.scheduled_dropout import Schedule

#: of lines, so that they can be told apart in grey
LOOKS = ("-", "--", "-.")


_RATE = re.compile(r"(?:train_)?(?:attn_reg/)?drop_((?:encoder|decoder)\.(?:self|cross)\[\d+\](?:@[\w.]+)*)")


@dataclass(frozen=True)
class Rates:
    """The drop rates of one site, each the mean over a stretch of training.

    Attributes:
        starts, ends: (N,) updates made before the first and after the last update of each stretch.
        drops: (N,) mean drop rates, in [0, 1].
    """

    starts: np.ndarray
    ends: np.ndarray
    drops: np.ndarray

    @property
    def middles(self) -> np.ndarray:
        """(N,) the mean of the update numbers that a stretch covers."""
        return (self.starts + self.ends - 1) / 2


def read_rates(path: Path) -> dict[str, Rates]:
    """The drop rates by site in fairseq's log, or in `trainer_state.json`; see `rates_of`."""
    if path.name == "trainer_state.json":
        return rates_of(json.loads(path.read_text(encoding="utf-8"))["log_history"])
    with path.open(encoding="utf-8", errors="replace") as lines:
        return rates_of(record for line in lines if "drop_" in line and (record := record_of(line)) is not None)


def rates_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Rates]:
    """The drop rates by site in the order of their sites; empty if the records hold none.

    Of the records that come every few updates and those that close an epoch, the more numerous count; of records at the
    same update, as a resumed run has them, the last.

    Args:
        records: of fairseq's log, or of the history that Trainer logs.
    """
    found: dict[str, dict[int, dict[str, float]]] = {}
    for record in records:
        kind = "train_" if "train_num_updates" in record else ""
        updates = finite(record.get(f"{kind}num_updates", record.get("step")))
        names = {key: _RATE.fullmatch(key) for key in record}
        # fairseq logs `null` for a site that nothing was dropped from since the last line; that says nothing
        rates = {name[1]: rate for key, name in names.items() if name and (rate := finite(record[key])) is not None}
        if rates and updates:
            found.setdefault(kind, {})[int(updates)] = rates
    of_updates = max(found.values(), key=len, default={})
    ends, series = sorted(of_updates), {}
    # the first stretch is as long as the second if the log starts in the middle of a run
    start = max(0, 2 * ends[0] - ends[1]) if len(ends) > 1 else 0
    for end in ends:
        for site, rate in of_updates[end].items():
            series.setdefault(site, []).append((start, end, rate))
        start = end
    return {site: Rates(*np.array(series[site]).T) for site in sorted(series, key=_order)}


def _parts(site: str) -> tuple[str, str, str]:
    """Stack and kind, layer and tower of a site's name, such as `encoder.self[0]@text`."""
    name, _, rest = site.partition("[")
    layer, _, tower = rest.partition("]")
    return name, layer, tower


def _order(site: str) -> tuple[bool, bool, str, int]:
    """The encoder first, self before cross, tower by tower, and layers as numbers."""
    name, layer, tower = _parts(site)
    return not name.startswith("encoder"), not name.endswith("self"), tower, int(layer)


def fit(rates: Rates, knots: int) -> tuple[Curve, float]:
    """A piecewise-linear curve through the drop rates of a site, by least squares, and its root mean square error.

    There are equally many rates between the knots. A logged rate is that of the middle of its stretch, and weighs as
    much as the stretch has updates. No more knots are taken than there are rates.
    """
    count = len(rates.drops)
    at = np.interp(np.linspace(0, count - 1, min(knots, count)), np.arange(count), rates.middles).round()
    at[-1], at[0] = rates.ends[-1] - 1, rates.starts[0]
    at = np.unique(at)
    basis = np.stack([np.interp(rates.middles, at, row) for row in np.eye(len(at))], axis=1)
    weights = np.sqrt(rates.ends - rates.starts)
    values, *_ = np.linalg.lstsq(basis * weights[:, None], rates.drops * weights, rcond=None)
    error = float(np.sqrt(np.mean((basis @ values - rates.drops) ** 2)))
    points = zip(at.tolist(), values.clip(0.0, 1.0).tolist(), strict=True)
    return Curve(tuple((int(place), round(value, 4)) for place, value in points)), error


def plot(rates: Mapping[str, Rates], curves: Mapping[str, Curve], path: Path) -> None:
    """Draw the logged rates, a panel for each kind of attention and a line for each layer, and the curves, dotted."""
    kinds = list(dict.fromkeys(site.partition("[")[0] for site in rates))
    figure, panels = plt.subplots(len(kinds), 1, figsize=(5, 3 * len(kinds)), squeeze=False, layout="constrained")
    for axes, kind in zip(panels[:, 0], kinds, strict=True):
        sites = [site for site in rates if site.startswith(f"{kind}[")]
        for number, site in enumerate(sites):
            color, look = plt.colormaps["viridis"](0.8 * number / max(1, len(sites) - 1)), LOOKS[number % len(LOOKS)]
            label = f"layer {site.partition('[')[2].replace(']', '')}"
            axes.plot(rates[site].middles, rates[site].drops, look, color=color, linewidth=1, label=label)
            axes.plot(*zip(*curves[site].points, strict=True), ":", color="black", linewidth=1)
        axes.set(xlabel="updates", ylabel="drop rate", title=kind.replace(".", " "), ylim=(-0.02, 1.02))
        axes.legend(ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("log", type=Path, help="a json log of fairseq-train, or trainer_state.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.txt", help="the schedule")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the drop rates, a line for each layer")
    parser.add_argument("--knots", type=int, default=9, metavar="N", help="points of a curve, at least 2 (default: 9)")
    given = parser.parse_args(words)
    if given.knots < 2:
        parser.error(f"--knots is {given.knots}, but must be at least 2")
    if not (rates := read_rates(given.log)):
        parser.error(f"{given.log} holds no drop rates of sites; see --attn-rates-by-site and rates_by_site")
    fits = {site: fit(series, given.knots) for site, series in rates.items()}
    schedule = Schedule(tuple((SiteSelector(site), curve) for site, (curve, _) in fits.items()))
    given.out.write_text(f"# Drop probability over updates, fitted to {given.log}.\n{schedule}", "utf-8")
    if given.plot:
        plot(rates, {site: curve for site, (curve, _) in fits.items()}, given.plot)
    layers: dict[tuple[str, str], list[str]] = {}
    for site, (curve, error) in fits.items():
        points = ", ".join(f"{drop:g} at {update:g}" for update, drop in curve.points)
        print(f"{site}: drop {points} (rms error {error:.4f}, {len(rates[site].drops)} records)")
        name, layer, tower = _parts(site)
        layers.setdefault((name, tower), []).append(layer)
    sites = " ".join(f"{name}[{','.join(found)}]{tower}" for (name, tower), found in layers.items())
    print(f"train with: --attn-reg scheduled_dropout --scheduled-dropout-schedule {given.out} --attn-sites '{sites}'")


if __name__ == "__main__":
    main()
