"""fairseq on numpy 2: what numpy took away is there again, for the modules of fairseq that ask for it.

It breaks `fairseq-eval-lm`, `--sample-break-mode eos` (`np.compat.long`), `--num-batch-buckets` (the same, and
`percentile(interpolation=...)`) and NAT with a CRF (`np.float`). numpy itself stays as it is: each of these
modules sees it through an object of its own.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
from fairseq.data import data_utils, language_pair_dataset, token_block_dataset
from fairseq.modules import dynamic_crf_layer

#: the modules of fairseq that need what numpy 2 has no more
MODULES: tuple[ModuleType, ...] = (data_utils, language_pair_dataset, token_block_dataset, dynamic_crf_layer)


class NumpyAsBefore:
    """numpy, with the names that fairseq 0.12 needs of numpy 1."""

    compat = SimpleNamespace(long=int)
    int = int
    float = float

    def __getattr__(self, name: str) -> Any:
        """numpy's own."""
        return getattr(numpy, name)

    @staticmethod
    def percentile(*args: Any, interpolation: str | None = None, **kwargs: Any) -> Any:
        """`numpy.percentile`, whose `method` was called `interpolation`."""
        return numpy.percentile(*args, **kwargs if interpolation is None else {**kwargs, "method": interpolation})


def mend() -> None:
    """Let `MODULES` see numpy as it was; nothing happens on numpy 1."""
    if hasattr(numpy, "compat"):
        return
    for module in MODULES:
        module.np = NumpyAsBefore()


mend()
