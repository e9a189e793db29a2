"""Statistics of a method: sums that stay on their devices until they are read, and how they are shown in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attn_reg_plugin.regularizers.base.distributed import average

if TYPE_CHECKING:
    from attn_reg_plugin.attention.sites import AttentionSite
    from attn_reg_plugin.regularizers.base.regularizer import Regularizer


@dataclass(frozen=True)
class Quantity:
    """A statistic that a face logs: a sum, unless it is divided by another one.

    Attributes:
        key: its sum, as given to `Statistics.add`.
        mean_of: the sum that it is divided by: how often it was added, or the whole that it is a share of.
        title: its name in logs; the key by default.
        site: the attention that it is the drop rate of; empty for anything else.
        needs: a sum without which it is not shown; empty: it always is.
    """

    key: str
    mean_of: str | None = None
    title: str = ""
    site: str = ""
    needs: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The sums that it is made from."""
        return tuple(filter(None, (self.key, self.mean_of, self.needs)))


class Shown(NamedTuple):
    """A quantity's value in a log; `weight` is what it was divided by, None for a sum."""

    value: float
    weight: float | None


def summary(quantities: Iterable[Quantity], sums: Mapping[str, Any], by_site: bool = True) -> dict[str, Shown]:
    """Show quantities by title, from sums that `Statistics.take` gave, added up; what did not happen is left out.

    Drop rates are shown as their mean over the sites, `drop_rate`, of further methods `METHOD_rate`; `by_site` shows
    each of them as well.
    """
    shown: dict[str, Shown] = {}
    rates: dict[str, list[Shown]] = {}
    for quantity in quantities:
        if quantity.needs and not sums.get(quantity.needs):
            continue
        value, weight = float(sums.get(quantity.key, 0.0)), None
        if quantity.mean_of is not None:
            weight = float(sums.get(quantity.mean_of, 0.0))
            if weight <= 0:
                continue
            value /= weight
        one = Shown(value, weight)
        if quantity.site:
            rates.setdefault(f"{quantity.title.removesuffix(f'_{quantity.site}')}_rate", []).append(one)
        if by_site or not quantity.site:
            shown[quantity.title or quantity.key] = one
    for title, found in rates.items():
        shown[title] = Shown(*(sum(column) / len(found) for column in zip(*found, strict=True)))
    return shown


class Statistics:
    """Named sums of numbers and scalar tensors; reading them is what synchronizes, not adding."""

    def __init__(self) -> None:
        self._sums: dict[str | tuple[str, ...], Any] = {}
        self._running: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Copies have the sums so far, without what is still running on a device."""
        return {"_sums": self._sums, "_running": []}

    def add(self, key: str | tuple[str, ...], value: float | Tensor) -> None:
        """Add `value` to the sum `key`; to several, one number or one each, (keys,), which are kept together."""
        self._sums[key] = self._sums.get(key, 0.0) + value

    @contextmanager
    def seconds(self, key: str, device: torch.device) -> Iterator[None]:
        """Add the time spent inside to `key`: of the host on CPU, of the device on CUDA (counted once it is over)."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self.add(key, time.perf_counter() - start)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._running.append((key, begin, end))
        self._collect()

    def take(self, *keys: str) -> dict[str, Any]:
        """The sums since the last call, all or those of `keys`: numbers, or scalar tensors on their device."""
        self._collect()
        for several in [key for key in self._sums if isinstance(key, tuple)]:
            values = self._sums.pop(several)
            for i, key in enumerate(several):
                self.add(key, values[i] if isinstance(values, Tensor) and values.dim() else values)
        chosen = [key for key in dict.fromkeys(keys) if key in self._sums] if keys else list(self._sums)
        return {key: self._sums.pop(key) for key in chosen}

    def _collect(self) -> None:
        """Add what is over on the device."""
        while self._running and self._running[0][2].query():
            key, begin, end = self._running.pop(0)
            self.add(key, begin.elapsed_time(end) / 1000.0)


def quantities(regularizer: Regularizer, device: torch.device, by_site: bool = True) -> dict[str, float]:
    """Return what happened since the last call, over all data-parallel ranks; each has to call.

    Returns:
        `regularized`, the share of forwards that were; what the method logs of updates and of rounds; `drop_rate`, the
        share of valid positions dropped, in [0, 1], as a mean over the sites; and, with `by_site`, that of each,
        `drop_SITE`. What did not happen is left out.
    """
    logged = [*regularizer.quantities, *regularizer.by_round]
    keys = list(dict.fromkeys(["forwards", *(key for quantity in logged for key in quantity.keys)]))
    taken = regularizer.statistics.take()
    dtype = torch.float32 if device.type == "mps" else torch.float64  # which that device does not have
    values = torch.stack([torch.as_tensor(taken.get(key, 0.0)).to(device, dtype) for key in keys])
    sums = dict(zip(keys, average(values).tolist(), strict=True))
    if not sums["forwards"]:
        return {}
    return {title: shown.value for title, shown in summary(logged, sums, by_site).items()}


def drop_rate(method: Regularizer, site: AttentionSite) -> Quantity:
    """Return the quantity that counts the drop rate of a site: `drop_SITE` in logs.

    Of the methods of a combination that have the site and count what they drop, that is the first one's; the others
    have `METHOD_SITE`.
    """
    first = next((other for other in method.companions if other.counts_drops and site in other.attached_sites), method)
    if first is method:
        return Quantity(f"dropped/{site.name}", f"valid/{site.name}", f"drop_{site.name}", site.name)
    key = f"{method.name}/{site.name}"
    return Quantity(f"dropped/{key}", f"valid/{key}", f"{method.name}_{site.name}", site.name)
