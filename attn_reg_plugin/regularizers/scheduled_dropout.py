"""Scheduled Bernoulli dropout, a by-product of AttendOut (Wu, Zhao & Zhang 2021, arXiv 2104.04692).

The drop rates that AttendOut's generator learns differ by layer and move over training (the paper's figure 3). Here
the masks come from such curves alone, without a generator: drop ~ Bernoulli(π(t)) at every position of the scores,
one mask a layer and shared by its heads as in AttendOut, where π is piecewise linear over training, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from attn_reg_plugin.attention.selection import SiteSelector
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base import Preset, option, register
from attn_reg_plugin.regularizers.base.drawn import kept_at_random
from attn_reg_plugin.regularizers.base.hooks.attachment import Attachment
from attn_reg_plugin.regularizers.base.hooks.forward import Forward
from attn_reg_plugin.regularizers.base.hooks.put_back import without_gradients
from attn_reg_plugin.regularizers.base.options import OptionError
from attn_reg_plugin.regularizers.base.schedule import UNITS, Curve, Timed

EXAMPLE = "drop encoder.self: 0:0.6 1000:0.1"
#: the paper's, for QNLI: all layers start at 0.6, the first stays near 0.55, the fourth falls faster, lower layers drop
#: more. Straight lines and the 0.11 of the last layer are chosen here, as in examples/scheduled_dropout
PAPER = "drop encoder.self: 0:0.6 1:0.55..0.11"

#: ending of the name of a schedule file
FILE = ".txt"


@dataclass(frozen=True)
class Schedule:
    """Curves by site pattern; where patterns overlap, the later one holds.

    Attributes:
        entries: (pattern, curve) pairs.
    """

    entries: tuple[tuple[SiteSelector, Curve], ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read `drop pattern: position:probability ...`, entries separated by `;` or by lines; `#` starts a comment.

        Two numbers, `position:first..last`, are those of the first and the last of the layers that the pattern names;
        the others lie between, evenly.

        Raises:
            ValueError: there is no entry, or one is not of this form.
        """
        lines = (line.partition("#")[0] for line in text.splitlines())
        entries = [entry.strip() for line in lines for entry in line.split(";") if entry.strip()]
        if not entries:
            raise ValueError(f"the schedule is empty; write for example {EXAMPLE!r}, or the path of a .txt file")
        return cls(tuple(map(_entry, entries)))

    @classmethod
    def read(cls, source: str) -> Schedule:
        """The schedule in the file `source` if that ends in .txt, else in the text itself.

        Raises:
            ValueError: it is malformed, or there is no such file.
        """
        path = file_of(source)
        if path is None:
            return cls.parse(source)
        try:
            return cls.parse(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ValueError(f"the schedule file {source} cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise ValueError(f"the schedule file {source} is not UTF-8 text") from None
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def assign(self, sites: Iterable[AttentionSite]) -> dict[str, Curve]:
        """The curve of each site, by the site's name; sites that no pattern names have none.

        Raises:
            ValueError: a pattern matches none of the sites.
        """
        sites, curves = list(sites), {}
        for selector, curve in self.entries:
            try:
                chosen = selector.select(sites)
                curves.update({site.name: curve.at_depth(_depth(site, chosen)) for site in chosen})
            except ValueError:
                there = " ".join(dict.fromkeys(site.name for site in sites))
                raise ValueError(
                    f"schedule entry {selector.pattern!r} does not fit the regularized sites, which are: {there}; "
                    "change it, or `sites`"
                ) from None
        return curves

    def __str__(self) -> str:
        """The text of a schedule file, one entry per line, as `parse` reads it."""
        lines = []
        for selector, curve in self.entries:
            lasts = [f"..{last:.15g}" for last in curve.deepest] or [""] * len(curve.points)
            points = [f"{x:.15g}:{y:.15g}{last}" for (x, y), last in zip(curve.points, lasts, strict=True)]
            lines.append(f"drop {selector.pattern}: {' '.join(points)}\n")
        return "".join(lines)


def _depth(site: AttentionSite, sites: Iterable[AttentionSite]) -> float:
    """Where the layer of a site lies among those of its stack and kind: 0 the first, 1 the last."""
    kind = (site.stack, site.kind, site.tower)
    layers = [other.layer for other in sites if (other.stack, other.kind, other.tower) == kind]
    return (site.layer - min(layers)) / max(1, max(layers) - min(layers))


def file_of(source: str) -> Path | None:
    """The file that a schedule is in; None if `source` is its text."""
    return Path(source.strip()) if source.strip().endswith(FILE) else None


def _entry(text: str) -> tuple[SiteSelector, Curve]:
    """Parse `drop pattern: position:probability ...`."""
    key, _, points = text.partition(":")
    word, pattern = [*key.split(maxsplit=1), "", ""][:2]
    try:
        pairs = [(float(x), [float(y) for y in ys.split("..")]) for x, ys in (p.split(":") for p in points.split())]
    except ValueError:
        pairs = []
    if word != "drop" or not pairs or any(len(ys) > 2 for _, ys in pairs):
        raise ValueError(f"schedule entry {text!r} is not understood; write for example {EXAMPLE!r}")
    selector = SiteSelector(pattern)
    try:
        deepest = tuple(ys[-1] for _, ys in pairs) if any(len(ys) > 1 for _, ys in pairs) else ()
        return selector, Curve(tuple((x, ys[0]) for x, ys in pairs), deepest)
    except ValueError as error:
        raise ValueError(f"schedule entry {text!r}: {error}") from None


@register("scheduled_dropout")
@dataclass(eq=False)
class ScheduledDropout(Timed):
    """Drop attention scores at random, with a probability that each layer's curve gives.

    A row that loses all its keys becomes uniform over its valid keys. A site whose drop probability is 0, or that the
    schedule does not name, is plain attention, bit for bit.

    Attributes:
        schedule: drop probabilities over training, such as `drop encoder.self: 0:0.6 1000:0.1; drop encoder.self[0]:
            0:0.5`, or the path of a .txt file with such entries; see `Schedule`.
        unit: what the curves count, see `Timed`.

    Raises:
        ValueError: the schedule is malformed, or the unit unknown.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset(
            "scheduled_dropout",
            "scheduled dropout",
            {"sites": "encoder.self", "unit": "progress", "schedule": PAPER},
        ),
    )

    draws_last: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset({"mask"})

    schedule: str = option("", f"drop probability over training, e.g. '{EXAMPLE}', or the path of a .txt file")
    unit: str = option("update", "what the schedule counts; progress: the share of the training", choices=UNITS)

    def __post_init__(self) -> None:
        """Check the options, and the schedule's file if it is there: who only reads a checkpoint has no need of it."""
        super().__post_init__()
        path = file_of(self.schedule)
        self.plan = self._read() if path is None or path.exists() else None
        self.curves: dict[str, Curve] = {}

    def _read(self) -> Schedule:
        plan = Schedule.read(self.schedule)
        last = max(x for _, curve in plan.entries for x, _ in curve.points)
        if self.unit == "progress" and last > 1:
            raise ValueError(
                f"the schedule has a point at {last:g}, but unit is progress, which ends at 1, with the training"
            )
        return plan

    def attach(self, model: nn.Module) -> Attachment:
        """As `Regularizer.attach`.

        Raises:
            OptionError: the schedule's file is missing, or an entry fits none of the regularized sites.
        """
        try:
            self.plan = self.plan or self._read()
        except ValueError as error:
            raise OptionError("schedule", str(error)) from None
        attachment = super().attach(model)
        try:
            self.curves = self.plan.assign(attachment.sites)
        except ValueError as error:
            self.detach()
            raise OptionError("schedule", str(error)) from None
        return attachment

    def drop_probabilities(self) -> dict[str, float]:
        """π(t) of every attached site at the present place in the training, by its name; 0 without a curve.

        Raises:
            RuntimeError: what the schedule counts was not announced.
        """
        position, curves = self.position(), self.curves
        return {s.name: curves[s.name](position) if s.name in curves else 0.0 for s in self.attached_sites}

    def due(self) -> bool:
        """Regularized when any site has something to drop."""
        return any(drop > 0 for drop in self.drop_probabilities().values())

    def before_forward(self, forward: Forward) -> None:
        """Leave on each site how its mask is drawn: the shape is known only when attention runs."""
        drop = self.drop_probabilities()
        for site in self.attached_sites:
            if drop[site.name] > 0:
                site.ask(sampler=self.sampler(partial(kept_at_random, drop[site.name], heads=1), alone=True))

    def rehearse(self, forward: Forward) -> None:
        """Run the forward once through regularized attention in which nothing is dropped yet."""
        if all(drop == 0 for curve in self.curves.values() for _, drop in curve.points):
            return
        for site in self.attached_sites:
            site.ask(keep=torch.ones((1, 1, 1, 1), dtype=torch.bool, device=forward.device))
        with without_gradients():
            forward.run()
