"""fairseq's log without what says nothing: averages of nothing, which it writes as `None`, and hydra's debugging.

A meter stays in the log once it was used. What is averaged in some updates only, such as the drop rates of every other
epoch, would have no value in the others. And hydra prints two lines among the translations of `fairseq-generate`.
"""

from __future__ import annotations

import logging

from fairseq.logging.meters import AverageMeter, MetersDict

_all_values = MetersDict.get_smoothed_values


def present_values(meters: MetersDict) -> dict[str, float]:
    """The values of all meters, but for averages of nothing."""
    values = _all_values(meters)
    empty = {name for name, meter in meters.items() if isinstance(meter, AverageMeter) and meter.avg is None}
    return type(values)((name, value) for name, value in values.items() if name not in empty)


def mend() -> None:
    """Put both right."""
    MetersDict.get_smoothed_values = present_values
    logging.getLogger("hydra").setLevel(logging.INFO)


mend()
