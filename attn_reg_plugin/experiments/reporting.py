"""`attn-reg report`: a page of experiments; and `attn-reg report curves`, a schedule from the drop rates of a run.

The schedule is for the expensive method, AttendOut, which learns how much to drop in which layer and when; scheduled
dropout repeats that at the cost of plain training. Any method that logs drop rates will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.files import write_text
from attn_reg_plugin.pictures import load_matplotlib, save

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.report.drop_rates import Fit, Rates


@dataclass(frozen=True, kw_only=True)
class Report:
    """The settings of `attn-reg report`."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg report runs/demo",
        "attn-reg report runs/first runs/second --out both.html --baseline attention_dropout",
    )

    runs: tuple[Path, ...] = setting("folders of attn-reg compare or finetune", metavar="OUT ...", positional=True)
    out: Path | None = setting("the page (default: report.html in the first OUT)", None, metavar="FILE.html")
    title: str = setting("above the page", "Training with attention regularizers")
    baseline: str = setting("what others are compared with", "plain", metavar="METHOD")

    def publish(self) -> None:
        """Write the page; a ValueError or FileNotFoundError says what is wrong, in one sentence."""
        from attn_reg_plugin.experiments.report.page import page, read_experiment

        out = self.out or self.runs[0] / "report.html"
        if out.suffix not in (".html", ".htm"):
            raise ValueError(f"--out is {out}, but its name must end in .html or .htm")
        load_matplotlib("a report")
        experiments = [read_experiment(folder, self.baseline) for folder in self.runs]
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page(experiments, self.title))
        for one in experiments:
            print(f"{one.title}: {len(one.rows)} methods, {len(one.finished)} of {len(one.runs)} runs finished")
            if len(one.rows) > 1 and self.baseline not in [row.method for row in one.rows]:
                said = f"no method is called {self.baseline!r}, so none is compared with it"
                print(f"{said}; --baseline names another")
        print(f"report: {out}")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The settings of `attn-reg report curves`."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg report curves runs/demo/attend_out-seed1 --out learned.yaml --plot learned.png",
        "attn-reg report curves results/trainer_state.json --out learned.yaml --knots 5",
    )

    run: Path = setting(
        "a json log of fairseq-train, trainer_state.json, or the folder with train.log or trainer_state.json",
        metavar="RUN",
        positional=True,
    )
    out: Path = setting("the schedule", metavar="FILE.yaml")
    plot: Path | None = setting("draw the drop rates, a line for each layer", None, metavar="FILE.png")
    knots: int = setting("points of a curve", 9, within="[2, inf)")

    def publish(self) -> None:
        """Fit a curve to each site's drop rates; write the schedule and the plot, and print what was found."""
        from attn_reg_plugin.attention.selection import SiteSelector
        from attn_reg_plugin.experiments.report.drop_rates import fit_curve, read_rates
        from attn_reg_plugin.regularizers.scheduled_dropout import FILES, Schedule

        if self.out.suffix not in FILES:
            raise ValueError(f"--out is {self.out}, but its name must end in {' or '.join(FILES)}")
        rates = read_rates(self.run)
        fits = {site: fit_curve(series, self.knots) for site, series in rates.items()}
        if self.plot:
            _plot(rates, fits, self.plot)
        schedule = Schedule(tuple((SiteSelector(site), fit.curve) for site, fit in fits.items()))
        head = f"# Drop probability over updates, fitted by `attn-reg report curves` to the run {self.run.name}.\n"
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.out, head + schedule.to_yaml())
        layers: dict[str, list[str]] = {}
        for site, fit in fits.items():
            points = ", ".join(f"{drop:g} at {update:g}" for update, drop in fit.curve.points)
            print(f"{site}: drop {points} (rms error {fit.error:.4f}, {len(rates[site].drops)} records)")
            name, _, layer = site.rstrip("]").partition("[")
            layers.setdefault(name, []).append(layer)
        sites = " ".join(f"{name}[{','.join(found)}]" for name, found in layers.items())
        print(
            f"train with: --attn-reg scheduled_dropout --scheduled-dropout-schedule {self.out} --attn-sites '{sites}'"
        )


def _plot(rates: Mapping[str, Rates], fits: Mapping[str, Fit], path: Path) -> None:
    """Draw the logged rates, and over them the fitted curves, dotted."""
    from attn_reg_plugin.experiments.report.curves import draw_curves, rate_panels

    figure = draw_curves(rate_panels(rates))
    for axes in figure.axes:
        for site, fit in fits.items():
            if site.startswith(axes.get_title().replace(" ", ".")):
                axes.plot(*zip(*fit.curve.points, strict=True), ":", color="black", linewidth=1)
    save(figure, path)
