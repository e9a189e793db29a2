"""The examples of a forward: what each is recognized by when it comes again, and which of its tokens are real.

An example is its token ids without padding, source and target, so that neither the order of the examples nor the other
sentences of its batch matter, and another tokenizer makes other examples. Where a model takes no ids, such as sound,
the numbers that it takes do as well.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.regularizers.generator import Tokens
from attn_reg_plugin.regularizers.probing import Forward

STACKS = ("encoder", "decoder")
_DECODER = re.compile(r"decoder|tgt|target|prev_output|\bdec_")
#: names of whole numbers that say something of the tokens beside them
_BESIDE = re.compile(r"type|segment|position|label|length|index|lang")


@dataclass(frozen=True)
class Examples:
    """The N examples of a forward, in the order of its batch.

    Attributes:
        digests: 16 bytes each.
        real: which tokens of a stack are real, bool (N, L) on the CPU, by `encoder` and `decoder`; a stack is missing
            where it isn't known, or where it has several texts an example: which of them an attention sees isn't.
    """

    digests: list[bytes]
    real: Mapping[str, Tensor] = field(default_factory=dict)
    _orders: dict[tuple[str, int], tuple[Tensor, Tensor] | None] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.digests)

    def lengths(self, stack: str, longest: int) -> Tensor:
        """How many of the `longest` positions of a stack are real, int64 (N,); all where it isn't known."""
        real = self._of(stack, longest)
        return torch.full((len(self),), longest) if real is None else real.sum(-1)

    def order(self, stack: str, longest: int) -> Tensor | None:
        """The positions of each example with the real ones first, int64 (N, `longest`); None if they are already."""
        orders = self._both_orders(stack, longest)
        return None if orders is None else orders[0]

    def order_back(self, stack: str, longest: int) -> Tensor | None:
        """What puts positions in that order back, int64 (N, `longest`); None where there is nothing to do."""
        orders = self._both_orders(stack, longest)
        return None if orders is None else orders[1]

    def _both_orders(self, stack: str, longest: int) -> tuple[Tensor, Tensor] | None:
        """There and back; found once for all sites of a forward."""
        if (stack, longest) not in self._orders:
            real, orders = self._of(stack, longest), None
            if real is not None and (real[:, 1:] & ~real[:, :-1]).any():
                there = (~real).to(torch.uint8).argsort(dim=-1, stable=True)
                orders = there, there.argsort(-1)
            self._orders[stack, longest] = orders
        return self._orders[stack, longest]

    def _of(self, stack: str, longest: int) -> Tensor | None:
        real = self.real.get(stack)
        return real if real is not None and real.size(1) == longest else None


def examples_of(forward: Forward) -> Examples:
    """The examples of a forward, by the tokens that were supplied, that the backends read off it, or by its tensors.

    Token ids are read by the host, which on a GPU waits for them; once for a forward, however often it is asked.

    Raises:
        ValueError: the forward has no tensor with an example per row, or its stacks have different numbers of them.
    """
    if forward.examples is None:
        forward.examples = _read(forward)
    return forward.examples


def _read(forward: Forward) -> Examples:
    told = forward.supplied.example_tokens or forward.described.get("example_tokens") or _guessed(forward.inputs)
    tokens = {stack: _several(told[stack]) for stack in STACKS if stack in told}
    if not tokens:
        raise ValueError(
            "no tensor with an example per row is among the arguments of the forward; set "
            "regularizer.supply(example_tokens={'encoder': Tokens(ids, valid)}) before it, or use probe='fresh'"
        )
    sizes = [(stack, one.ids.size(0)) for stack, several in tokens.items() for one in several]
    (first, rows), *_ = sizes
    for stack, other in sizes:
        if other != rows:
            raise ValueError(
                f"the {first} has {rows} examples, but the {stack} {other}; kept attributions need one target for each "
                "source: use probe='fresh'"
            )
    hashes = [hashlib.blake2b(digest_size=16) for _ in range(rows)]
    real, seen = {}, set()
    for stack, several in tokens.items():
        for ids, valid in several:
            if valid is not None:
                valid = valid.detach().bool().cpu()
                if len(several) == 1:
                    real[stack] = valid
            if id(ids) in seen:
                continue
            seen.add(id(ids))
            ids = ids.detach().cpu()
            for i, digest in enumerate(hashes):
                row = _bytes(ids[i] if valid is None else ids[i][valid[i]])
                digest.update(f"{stack} {len(row)} ".encode() + row)
    return Examples([digest.digest() for digest in hashes], real)


def _several(told: Tokens | Sequence[Tokens]) -> Sequence[Tokens]:
    return [told] if isinstance(told, Tokens) else told


def _bytes(row: Tensor) -> bytes:
    """The numbers of a row as they are in memory; those of bfloat16 and others too."""
    row = row.to(torch.int64) if not row.is_floating_point() else row
    row = row.contiguous()
    return ctypes.string_at(row.data_ptr(), row.numel() * row.element_size()) if row.numel() else b""


def _guessed(inputs: Mapping[str, Any]) -> dict[str, list[Tokens]]:
    """Of a model that no backend describes: the whole-number tensors of each stack, else the first of numbers."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 1}
    rows = next((value.size(0) for value in tensors.values()), 0)
    tensors = {name: value for name, value in tensors.items() if value.size(0) == rows}
    whole = {k: v for k, v in tensors.items() if not v.is_floating_point() and v.dtype != torch.bool}
    named = whole or {name: value for name, value in tensors.items() if value.is_floating_point()}
    found: dict[str, list[Tokens]] = {}
    for name, value in named.items():
        stack = "decoder" if _DECODER.search(name) else "encoder"
        if "mask" not in name and (stack not in found or (whole and not _BESIDE.search(name))):
            found.setdefault(stack, []).append(Tokens(value, _mask(value, stack, tensors)))
    if len(found) == 1:  # one stack: whichever the sites call it
        found = dict.fromkeys(STACKS, *found.values())
    return found


def _mask(ids: Tensor, stack: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The padding mask beside the ids: `...padding_mask` is True at padding, `attention_mask` and `token_mask` not."""
    for name, mask in tensors.items():
        same = mask.shape == ids.shape[:2] and ("decoder" if _DECODER.search(name) else "encoder") == stack
        if same and name.endswith("padding_mask"):
            return ~mask.bool()
        if same and name.endswith(("attention_mask", "token_mask")):
            return mask.bool()
    return None
