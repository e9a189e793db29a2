"""`attn-reg report`: what runs say. `html` makes a page of any number of them; `curves` turns the drop rates of one
into a schedule and a plot.

`attn-reg report RUNS...` without a word between is the page. `curves` is for the expensive method, AttendOut, which
learns how much to drop in which layer and when; scheduled dropout repeats that at the cost of plain training. Any
method that logs drop rates will do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from attn_reg_plugin.attention.sites import SiteSelector
from attn_reg_plugin.experiments.drop_rate_plot import plot_rates
from attn_reg_plugin.experiments.drop_rates import fit_curve, read_rates
from attn_reg_plugin.files import write_text
from attn_reg_plugin.pictures import check_format, load_matplotlib
from attn_reg_plugin.regularizers.scheduled_dropout import FILES, Schedule

HTML, CURVES = "html", "curves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg report`."""
    parser.usage = "attn-reg report [html] RUN [RUN ...] [--out FILE.html] | attn-reg report curves RUN --out FILE.yaml"
    reports = parser.add_subparsers(dest="report", required=True, metavar="REPORT", prog="attn-reg report")
    text = "one HTML page about runs: table, bars, convergence, drop rates, cost, configuration"
    html = reports.add_parser(HTML, help=f"{text} (the word may be left out)", description=text)
    html.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folder of attn-reg compare, finetune or Trainer, of one run or of many; or a json log of fairseq-train",
    )
    html.add_argument("--out", type=Path, metavar="FILE.html", help="default: report.html in the first RUN")
    html.add_argument("--title", default="Training with attention regularizers", help="of the page")
    html.add_argument(
        "--baseline", default="plain", metavar="METHOD", help="what others are compared with (default: %(default)s)"
    )
    text = "the drop rates of a run, as a schedule file for scheduled dropout and as a plot"
    curves = reports.add_parser(CURVES, help=text, description=text)
    curves.add_argument(
        "run_log",
        type=Path,
        metavar="RUN",
        help="a json log of fairseq-train, trainer_state.json, the folder of one, or the output folder of Trainer",
    )
    curves.add_argument("--out", type=Path, required=True, metavar="FILE.yaml", help="the schedule file to write")
    curves.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the drop rates, one line per layer")
    curves.add_argument(
        "--knots", type=int, default=5, help="most points of a curve, at least 2 (default: %(default)s)"
    )
    _make_html_the_default(parser)


def _make_html_the_default(parser: argparse.ArgumentParser) -> None:
    """Let `html` be left out: a first word that names no report is a run or a flag of the page."""
    parse = parser.parse_known_args

    def with_report(
        args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(args)
        if words and words[0] not in (HTML, CURVES, "-h", "--help"):
            words.insert(0, HTML)
        return parse(words, namespace)

    parser.parse_known_args = with_report  # type: ignore[method-assign]


def run(arguments: argparse.Namespace) -> int:
    """Write the page or the schedule.

    Raises ValueError or FileNotFoundError with one sentence on bad input.
    """
    return _html(arguments) if arguments.report == HTML else _curves(arguments)


def _html(arguments: argparse.Namespace) -> int:
    """Read the runs, write the page, and say where it is."""
    from attn_reg_plugin.experiments.report_page import page
    from attn_reg_plugin.experiments.report_runs import read_experiments

    first = arguments.runs[0]
    out = arguments.out or (first if first.is_dir() else first.parent) / "report.html"
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"--out is {out}, but its name must end in .html or .htm")
    load_matplotlib("a report")
    experiments = read_experiments(arguments.runs, arguments.baseline)
    text = page(experiments, arguments.title)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    for one in experiments:
        print(f"{one.title}: {len(one.groups)} methods, {sum(len(group.runs) for group in one.groups)} runs")
        if one.baseline is None and len(one.groups) > 1:
            print(f"no method is called {arguments.baseline!r}, so none is compared with it; --baseline names another")
    print(f"report: {out}")
    return 0


def _curves(arguments: argparse.Namespace) -> int:
    """Fit a curve to each site's drop rates; write the schedule and the plot, and print what was found."""
    if arguments.out.suffix not in FILES:
        raise ValueError(f"--out is {arguments.out}, but its name must end in {' or '.join(FILES)}")
    if arguments.knots < 2:
        raise ValueError(f"--knots is {arguments.knots}, but must be at least 2")
    if arguments.plot:
        check_format(arguments.plot, "--plot")
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
