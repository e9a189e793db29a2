"""Drop rates as a run logged them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attn_reg_plugin.experiments.training_log import finite, record_of

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

    def thinned(self, most: int) -> Rates:
        """At most `most` stretches, neighbours averaged."""
        groups = np.array_split(np.arange(len(self.drops)), min(most, len(self.drops)))
        lengths = self.ends - self.starts
        return Rates(
            np.array([self.starts[group[0]] for group in groups]),
            np.array([self.ends[group[-1]] for group in groups]),
            np.array([np.average(self.drops[group], weights=lengths[group]) for group in groups]),
        )


def rates_of_log(path: Path) -> dict[str, Rates]:
    """The drop rates by site in fairseq's log, see `rates_of`."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        records = [record for line in lines if "drop_" in line and (record := record_of(line)) is not None]
    return rates_of(records)


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


def _order(site: str) -> tuple[bool, bool, str, int]:
    """The encoder first, self before cross, tower by tower, and layers as numbers."""
    name, _, rest = site.partition("[")
    layer, _, tower = rest.partition("]")
    return not name.startswith("encoder"), not name.endswith("self"), tower, int(layer)
