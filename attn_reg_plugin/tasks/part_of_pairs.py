"""Translation trained on a part of the training set: sentence pairs cut down to what is drawn of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from fairseq.data import BaseWrapperDataset, LanguagePairDataset

from attn_reg_plugin.labelled import Sampling


def keep_part(pairs: LanguagePairDataset, sampling: Sampling) -> None:
    """Leave of sentence pairs the part that is drawn, in its order; the same in every process and after resuming.

    Args:
        pairs: changed in place. Batches are made of what is left.
        sampling: of it the number of pairs or their share, and the seed.
    """
    chosen = np.array(sampling.of(range(len(pairs))), dtype=np.int64)  # type: ignore[arg-type]
    if len(chosen) == len(pairs):
        return
    for name in ("src", "tgt", "align_dataset"):
        if getattr(pairs, name) is not None:
            setattr(pairs, name, ChosenDataset(getattr(pairs, name), chosen))
    for name in ("sizes", "src_sizes", "tgt_sizes", "bucketed_num_tokens"):
        if getattr(pairs, name, None) is not None:
            setattr(pairs, name, getattr(pairs, name)[chosen])


class ChosenDataset(BaseWrapperDataset):
    """Some examples of a dataset.

    Args:
        dataset: of any kind.
        chosen: the numbers of the examples, (N,).
    """

    def __init__(self, dataset: Any, chosen: np.ndarray) -> None:
        super().__init__(dataset)
        self.chosen = chosen

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.chosen[index])]

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def sizes(self) -> np.ndarray:
        """The number of tokens of each, (N,)."""
        return np.asarray(self.dataset.sizes)[self.chosen]

    def prefetch(self, indices: Any) -> None:
        """Read some of them ahead."""
        self.dataset.prefetch(self.chosen[np.asarray(indices)])
