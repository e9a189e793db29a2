"""Fit a schedule of scheduled dropout to the drop rates that a training logged, such as AttendOut's:

    python fit_schedule.py runs/demo/attend_out-seed1/train.log --out learned.yaml --plot learned.png
    python fit_schedule.py results/checkpoint-500/trainer_state.json --out learned.yaml --knots 5

The log is that of fairseq-train with `--log-format json --attn-rates-by-site`, or the `trainer_state.json` of a Trainer
whose method has `rates_by_site=True`. AttendOut learns how much to drop in which layer and when; scheduled dropout
repeats that at the cost of plain training. The plot is the paper's figure 3, with the curves dotted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from attn_reg_plugin.attention.selection import SiteSelector
from attn_reg_plugin.experiments.report.curves import draw_curves, rate_panels
from attn_reg_plugin.experiments.report.drop_rates import Rates, rates_of, rates_of_log
from attn_reg_plugin.regularizers.scheduled_dropout import Curve, Schedule


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
    """Draw the logged rates, and over them the fitted curves, dotted."""
    figure = draw_curves(rate_panels(rates))
    for axes in figure.axes:
        for site, curve in curves.items():
            if site.startswith(axes.get_title().replace(" ", ".")):
                axes.plot(*zip(*curve.points, strict=True), ":", color="black", linewidth=1)
    figure.savefig(path, dpi=150)


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("log", type=Path, help="a json log of fairseq-train, or trainer_state.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.yaml", help="the schedule")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the drop rates, a line for each layer")
    parser.add_argument("--knots", type=int, default=9, metavar="N", help="points of a curve, at least 2 (default: 9)")
    given = parser.parse_args(words)
    if given.knots < 2:
        parser.error(f"--knots is {given.knots}, but must be at least 2")
    if given.log.name == "trainer_state.json":
        rates = rates_of(json.loads(given.log.read_text(encoding="utf-8"))["log_history"])
    else:
        rates = rates_of_log(given.log)
    if not rates:
        parser.error(f"{given.log} holds no drop rates of sites; see --attn-rates-by-site and rates_by_site")
    fits = {site: fit(series, given.knots) for site, series in rates.items()}
    schedule = Schedule(tuple((SiteSelector(site), curve) for site, (curve, _) in fits.items()))
    given.out.write_text(f"# Drop probability over updates, fitted to {given.log}.\n{schedule.to_yaml()}", "utf-8")
    if given.plot:
        plot(rates, {site: curve for site, (curve, _) in fits.items()}, given.plot)
    layers: dict[str, list[str]] = {}
    for site, (curve, error) in fits.items():
        points = ", ".join(f"{drop:g} at {update:g}" for update, drop in curve.points)
        print(f"{site}: drop {points} (rms error {error:.4f}, {len(rates[site].drops)} records)")
        name, _, layer = site.rstrip("]").partition("[")
        layers.setdefault(name, []).append(layer)
    sites = " ".join(f"{name}[{','.join(found)}]" for name, found in layers.items())
    print(f"train with: --attn-reg scheduled_dropout --scheduled-dropout-schedule {given.out} --attn-sites '{sites}'")


if __name__ == "__main__":
    main()
