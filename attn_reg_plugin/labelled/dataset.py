"""Encoded examples as a fairseq dataset: dynamic padding, batches grouped by length, a new order every epoch.

A batch, for a Hugging Face model behind fairseq's trainer:

    {"id": (B,), "nsentences": B, "ntokens": real tokens,
     "net_input": {"input_ids", "attention_mask", and "token_type_ids" where the tokenizer gives them},
     "target": classes (B,) int64, values (B,) float64, tags (B, T) int64 with -100, or None without labels}

The three of `net_input` are (B, T) int64, of multiple choice (B, choices, T); mask: 1 = a real token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset, data_utils
from torch import Tensor

from attn_reg_plugin.labelled.encoding import Encoded
from attn_reg_plugin.labelled.task_table import MULTIPLE_CHOICE, REGRESSION, TAGGING
from attn_reg_plugin.regularizers.base.outputs import IGNORED


class LabelledDataset(FairseqDataset):
    """A split.

    Args:
        rows: the examples, see `encode`.
        kind: of the task.
        tokenizer: says what is padded with, and on which side.
        shuffle, seed: a new order every epoch, by this seed; without, the order of the rows.
        grouped: examples of like length come together (ties in random order); without, batches are drawn at random,
            as in most papers on GLUE, and padded more.
        word_dropout: share of the tokens, special ones apart, that the mask token replaces, drawn anew every epoch.

    Raises:
        ValueError: there are no rows, or the tokenizer has no padding token, or no mask token for word dropout.
    """

    def __init__(
        self,
        rows: Sequence[Encoded],
        kind: str,
        tokenizer: Any,
        shuffle: bool = False,
        seed: int = 1,
        grouped: bool = True,
        word_dropout: float = 0.0,
    ) -> None:
        if not rows:
            raise ValueError("the data set has no examples")
        if tokenizer.pad_token_id is None:
            raise ValueError(f"{type(tokenizer).__name__} has no padding token; give it one: tokenizer.pad_token")
        if word_dropout and tokenizer.mask_token_id is None:
            raise ValueError(f"{type(tokenizer).__name__} has no mask token, which word dropout puts in place of words")
        self.rows, self.kind = rows, kind
        self.word_dropout, self.mask, self.special = word_dropout, tokenizer.mask_token_id, tokenizer.all_special_ids
        self.padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
        self.left = tokenizer.padding_side == "left"
        self.shuffle, self.seed, self.grouped, self.epoch = shuffle, seed, grouped, 1
        self.choices = len(rows[0].input_ids) if kind == MULTIPLE_CHOICE else 1
        self.sizes = np.array([max(map(len, self._inputs(row.input_ids))) for row in rows], dtype=np.int64)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "row": self.rows[index]}

    def __len__(self) -> int:
        return len(self.rows)

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens(self, index: int) -> int:
        """Count towards --max-tokens: the example's tokens, all choices padded to the longest."""
        return int(self.sizes[index]) * self.choices

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices] * self.choices

    def set_epoch(self, epoch: int) -> None:
        """Announce the epoch, counted from 1, before its batches are made."""
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Make batches anew every epoch if their order changes."""
        return not self.shuffle

    def ordered_indices(self) -> np.ndarray:
        """Give the order in which batches are filled, by seed and epoch only, so that a resumed run has the same."""
        order = np.arange(len(self), dtype=np.int64)
        if self.shuffle:
            with data_utils.numpy_seed(self.seed, self.epoch):
                order = np.random.permutation(len(self)).astype(np.int64)
        return order[np.argsort(self.sizes[order], kind="stable")] if self.grouped else order

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch, padded to its own longest; see the top of this file."""
        if not samples:
            return {}
        rows = [sample["row"] for sample in samples]
        inputs = [ids for sample in samples for ids in self._seen(sample)]
        width = max(map(len, inputs))
        net_input = {
            "input_ids": self._stack(inputs, width, self.padding["input_ids"]),
            "attention_mask": self._stack([np.ones_like(ids) for ids in inputs], width, 0),
        }
        if rows[0].token_type_ids is not None:
            types = [ids for row in rows for ids in self._inputs(row.token_type_ids)]
            net_input["token_type_ids"] = self._stack(types, width, self.padding["token_type_ids"])
        if self.kind == MULTIPLE_CHOICE:
            net_input = {name: ids.view(len(rows), self.choices, width) for name, ids in net_input.items()}
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "net_input": net_input,
            "target": self._target(rows, width),
            "ntokens": sum(len(ids) for ids in inputs),
            "nsentences": len(rows),
        }

    def _inputs(self, ids: np.ndarray | tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return ids if self.kind == MULTIPLE_CHOICE else (ids,)

    def _seen(self, sample: dict[str, Any]) -> tuple[np.ndarray, ...]:
        """Return an example's input ids, with words dropped by seed, epoch and example only."""
        inputs = self._inputs(sample["row"].input_ids)
        if not self.word_dropout:
            return inputs
        generator = np.random.default_rng((self.seed, self.epoch, sample["id"]))
        return tuple(
            np.where((generator.random(len(ids)) < self.word_dropout) & ~np.isin(ids, self.special), self.mask, ids)
            for ids in inputs
        )

    def _target(self, rows: list[Encoded], width: int) -> Tensor | None:
        labels = [row.label for row in rows]
        if any(label is None for label in labels):
            return None
        if self.kind == TAGGING:
            return self._stack(labels, width, IGNORED)
        # fairseq turns float32 of a batch into half precision, which would round the values
        return torch.tensor(labels, dtype=torch.float64 if self.kind == REGRESSION else torch.int64)

    def _stack(self, rows: Sequence[np.ndarray], width: int, filling: int) -> Tensor:
        """Stack rows of unequal length, int64 (number of rows, width)."""
        tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
        return data_utils.collate_tokens(tensors, filling, left_pad=self.left, pad_to_length=width)
