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

import torch
from torch import Tensor

from attn_reg_plugin.regularizers.generator import Tokens
from attn_reg_plugin.regularizers.probing import Forward

STACKS = ("encoder", "decoder")
_DECODER = re.compile(r"decoder|tgt|target|prev_output|\bdec_")
#: names of numbers that say something of the tokens beside them
_BESIDE = re.compile(r"type|segment|position|length|index|lang")
#: and of those by which no example is known
_NEVER = re.compile(r"mask|label")


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
    _orders: dict[tuple[str, int, torch.device], tuple[Tensor, Tensor] | None] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.digests)

    def lengths(self, stack: str, longest: int) -> Tensor:
        """How many of the `longest` positions of a stack are real, int64 (N,); all where it isn't known."""
        real = self._of(stack, longest)
        return torch.full((len(self),), longest) if real is None else real.sum(-1)

    def order(self, stack: str, longest: int, device: torch.device) -> Tensor | None:
        """The positions of each example with the real ones first, int64 (N, `longest`); None if they are already."""
        orders = self._both_orders(stack, longest, device)
        return None if orders is None else orders[0]

    def order_back(self, stack: str, longest: int, device: torch.device) -> Tensor | None:
        """What puts positions in that order back, int64 (N, `longest`); None where there is nothing to do."""
        orders = self._both_orders(stack, longest, device)
        return None if orders is None else orders[1]

    def _both_orders(self, stack: str, longest: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """There and back; found and copied to the device once for all sites of a forward."""
        if (stack, longest, device) not in self._orders:
            real, orders = self._of(stack, longest), None
            if real is not None and (real[:, 1:] & ~real[:, :-1]).any():
                there = (~real).to(torch.uint8).argsort(dim=-1, stable=True)
                orders = there.to(device), there.argsort(-1).to(device)
            self._orders[stack, longest, device] = orders
        return self._orders[stack, longest, device]

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
    told = forward.supplied.example_tokens or forward.described.get("example_tokens") or _guessed(forward)
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


def _guessed(forward: Forward) -> dict[str, list[Tokens]]:
    """Of a model that no backend describes: of each stack the tensors of whole numbers, else the first of numbers.

    Only the arguments of the forward are looked at: what was supplied are answers. Its token mask says which are real.
    """
    tensors = {k: v for k, v in forward.arguments.items() if isinstance(v, Tensor) and v.dim() > 1}
    rows = next((value.size(0) for value in tensors.values()), 0)
    tensors = {name: value for name, value in tensors.items() if value.size(0) == rows}
    mask = forward.inputs.get("token_mask")
    masks = {**tensors, "token_mask": mask} if isinstance(mask, Tensor) else tensors
    able = {name: value for name, value in tensors.items() if value.dtype != torch.bool and not _NEVER.search(name)}
    found: dict[str, list[Tokens]] = {}
    for stack in STACKS:
        mine = {name: value for name, value in able.items() if _stack(name) == stack}
        told = [value for name, value in mine.items() if not _BESIDE.search(name)] or list(mine.values())
        chosen = [value for value in told if not value.is_floating_point()] or told[:1]
        if chosen:
            found[stack] = [Tokens(value, _mask(value, stack, masks)) for value in chosen]
    if len(found) == 1:  # one stack: whichever the sites call it
        found = dict.fromkeys(STACKS, *found.values())
    return found


def _stack(name: str) -> str:
    """Whose a tensor is, by its name."""
    return "decoder" if _DECODER.search(name) else "encoder"


def _mask(ids: Tensor, stack: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The padding mask beside the ids: `...padding_mask` is True at padding, `attention_mask` and `token_mask` not."""
    for name, mask in tensors.items():
        same = mask.shape == ids.shape[:2] and _stack(name) == stack
        if same and name.endswith("padding_mask"):
            return ~mask.bool()
        if same and name.endswith(("attention_mask", "token_mask")):
            return mask.bool()
    return None
