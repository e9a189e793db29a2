"""`attn-reg report`: what finished runs say. `curves` turns the drop rates of a run into a schedule and a plot.

The expensive method, AttendOut, learns how much to drop in which layer and when; scheduled dropout repeats that at the
cost of plain training. Any method that logs drop rates will do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from attn_reg_plugin.attention.sites import SiteSelector
from attn_reg_plugin.experiments.drop_rate_plot import check_format, plot_rates
from attn_reg_plugin.experiments.drop_rates import fit_curve, read_rates
from attn_reg_plugin.files import write_text
from attn_reg_plugin.regularizers.scheduled_dropout import FILES, Schedule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg report`."""
    reports = parser.add_subparsers(dest="report", required=True, metavar="REPORT")
    text = "the drop rates of a run, as a schedule file for scheduled dropout and as a plot"
    curves = reports.add_parser("curves", help=text, description=text)
    curves.add_argument("run_log", type=Path, metavar="RUN", help="a json log of fairseq-train, or the folder of one")
    curves.add_argument("--out", type=Path, required=True, metavar="FILE.yaml", help="the schedule file to write")
    curves.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the drop rates, one line per layer")
    curves.add_argument(
        "--knots", type=int, default=5, help="most points of a curve, at least 2 (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Fit a curve to each site's drop rates; write the schedule and the plot, and print what was found.

    Raises ValueError or FileNotFoundError with one sentence on bad input.
    """
    if arguments.out.suffix not in FILES:
        raise ValueError(f"--out is {arguments.out}, but its name must end in {' or '.join(FILES)}")
    if arguments.knots < 2:
        raise ValueError(f"--knots is {arguments.knots}, but must be at least 2")
    if arguments.plot:
        check_format(arguments.plot)
    rates = read_rates(arguments.run_log)
    fits = {site: fit_curve(series, arguments.knots) for site, series in rates.items()}
    schedule = Schedule(tuple((SiteSelector(site), fit.curve) for site, fit in fits.items()))
    head = f"# Drop probability over updates, fitted by `attn-reg report curves` to the run {arguments.run_log.name}.\n"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.plot:
        plot_rates(rates, fits, arguments.plot)
    write_text(arguments.out, head + schedule.to_yaml())
    for site, fit in fits.items():
        points = ", ".join(f"{drop:g} at {update:g}" for update, drop in fit.curve.points)
        print(f"{site}: drop {points} (rms error {fit.error:.4f}, {len(rates[site].drops)} records)")
    print(
        f"train with: --attn-reg scheduled_dropout --scheduled-dropout-schedule {arguments.out} "
        f"--attn-sites '{pattern_of(fits)}'"
    )
    return 0


def pattern_of(sites: Iterable[str]) -> str:
    """The site pattern that names exactly `sites`: `encoder.self[0] encoder.self[1]` is `encoder.self[0,1]`."""
    layers: dict[str, list[str]] = {}
    for site in sites:
        name, _, layer = site.rstrip("]").partition("[")
        layers.setdefault(name, []).append(layer)
    return " ".join(f"{name}[{','.join(found)}]" for name, found in layers.items())
