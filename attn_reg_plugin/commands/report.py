"""`attn-reg report`: a page of experiments; or a schedule, from the drop rates of a run.

`attn-reg report OUT...` is the page. `attn-reg report curves RUN` is for the expensive method, AttendOut, which learns
how much to drop in which layer and when; scheduled dropout repeats that at the cost of plain training. Any method that
logs drop rates will do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attn_reg_plugin.files import write_text
from attn_reg_plugin.pictures import check_format, load_matplotlib, save

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.report.drop_rates import Fit, Rates

EXAMPLES = (
    "attn-reg report runs/demo",
    "attn-reg report curves runs/demo/attend_out-seed1 --out learned.yaml --plot learned.png",
)
#: the word that asks for a schedule
CURVES = "curves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg report`."""
    parser.usage = (
        "attn-reg report OUT [OUT ...] [--baseline METHOD] [--out FILE.html] | "
        "attn-reg report curves RUN --out FILE.yaml [--plot FILE.png]"
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="OUT",
        help="folder of attn-reg compare or finetune, or with folders METHOD-seedN of Trainer or fairseq-train; or the "
        "word curves, and a RUN: a json log of fairseq-train, trainer_state.json, or the folder of either",
    )
    text = "of the page (default: report.html in the first OUT); of curves the schedule file"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    page = parser.add_argument_group("of the page")
    page.add_argument("--title", default="Training with attention regularizers", help="(default: %(default)s)")
    page.add_argument(
        "--baseline", default="plain", metavar="METHOD", help="what others are compared with (default: %(default)s)"
    )
    curves = parser.add_argument_group("of curves")
    curves.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the drop rates, a line for each layer")
    curves.add_argument(
        "--knots", type=int, default=5, help="most points of a curve, at least 2 (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page or the schedule.

    Raises:
        ValueError, FileNotFoundError: bad input, in one sentence.
    """
    if str(arguments.runs[0]) == CURVES:
        return _curves(arguments)
    from attn_reg_plugin.experiments.report.page import page, read_experiment

    out = arguments.out or arguments.runs[0] / "report.html"
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"--out is {out}, but its name must end in .html or .htm")
    load_matplotlib("a report")
    experiments = [read_experiment(folder, arguments.baseline) for folder in arguments.runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(experiments, arguments.title))
    for one in experiments:
        print(f"{one.title}: {len(one.rows)} methods, {len(one.finished)} of {len(one.runs)} runs finished")
        if len(one.rows) > 1 and arguments.baseline not in [row.method for row in one.rows]:
            print(f"no method is called {arguments.baseline!r}, so none is compared with it; --baseline names another")
    print(f"report: {out}")
    return 0


def _curves(arguments: argparse.Namespace) -> int:
    """Fit a curve to each site's drop rates; write the schedule and the plot, and print what was found."""
    from attn_reg_plugin.attention.selection import SiteSelector
    from attn_reg_plugin.experiments.report.drop_rates import fit_curve, read_rates
    from attn_reg_plugin.regularizers.scheduled_dropout import FILES, Schedule

    out, given = arguments.out, arguments.runs[1:]
    if len(given) != 1:
        raise ValueError(f"attn-reg report curves takes one RUN, given {len(given)}")
    if out is None or out.suffix not in FILES:
        raise ValueError(f"--out is {out}, but its name must end in {' or '.join(FILES)}")
    if arguments.knots < 2:
        raise ValueError(f"--knots is {arguments.knots}, but must be at least 2")
    if arguments.plot:
        check_format(arguments.plot, "--plot")
    rates = read_rates(given[0])
    fits = {site: fit_curve(series, arguments.knots) for site, series in rates.items()}
    schedule = Schedule(tuple((SiteSelector(site), fit.curve) for site, fit in fits.items()))
    head = f"# Drop probability over updates, fitted by `attn-reg report curves` to the run {given[0].name}.\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.plot:
        _plot(rates, fits, arguments.plot)
    write_text(out, head + schedule.to_yaml())
    for site, fit in fits.items():
        points = ", ".join(f"{drop:g} at {update:g}" for update, drop in fit.curve.points)
        print(f"{site}: drop {points} (rms error {fit.error:.4f}, {len(rates[site].drops)} records)")
    print(
        f"train with: --attn-reg scheduled_dropout --scheduled-dropout-schedule {out} --attn-sites '{pattern_of(fits)}'"
    )
    return 0


def _plot(rates: Mapping[str, Rates], fits: Mapping[str, Fit], path: Path) -> None:
    """Draw the logged rates, and over them the fitted curves, dotted."""
    from attn_reg_plugin.experiments.report.curves import draw_curves, rate_panels

    figure = draw_curves(rate_panels(rates))
    for axes in figure.axes:
        for site, fit in fits.items():
            if site.startswith(axes.get_title().replace(" ", ".")):
                axes.plot(*zip(*fit.curve.points, strict=True), ":", color="black", linewidth=1)
    save(figure, path)


def pattern_of(sites: Iterable[str]) -> str:
    """The site pattern that names exactly `sites`: `encoder.self[0] encoder.self[1]` is `encoder.self[0,1]`."""
    layers: dict[str, list[str]] = {}
    for site in sites:
        name, _, layer = site.rstrip("]").partition("[")
        layers.setdefault(name, []).append(layer)
    return " ".join(f"{name}[{','.join(found)}]" for name, found in layers.items())
