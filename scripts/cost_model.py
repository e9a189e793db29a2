"""Cost of AD-DROP in a step of a decoder under FSDP2, by formulas, and a count of the same in small models.

    python scripts/cost_model.py            # writes its tables into docs/appendix.md
    python scripts/cost_model.py --count    # and first checks the formulas by counting

Counted are floating-point operations (torch.utils.flop_counter) and the bytes of tensors that are alive at once, in a
decoder of the same form with a few hundred thousand weights. Time is not modelled.

With M the products with weights of a forward and A its attention, a plain step is 3 M + 3 A. The probe adds M + A for
its forward, M + 2 A for a backward that computes no gradient of a weight, and A/2 for ∂F/∂O · Vᵀ; with checkpointing
the layers' forward once more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pages import filled
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attn_reg_plugin import ADDrop, AttentionSite, regularized_attention
from attn_reg_plugin.attention.masks import sample_keep

PAGE = Path(__file__).resolve().parents[1] / "docs" / "appendix.md"


@dataclass(frozen=True)
class Shape:
    """A decoder with gated feed-forward networks, as Llama has them, and what one process trains on.

    Attributes:
        layers, width, inner, heads, vocabulary: L, C, the network's inner width, H, V.
        length, batch: T, and B of one process.
        recomputes: activation checkpointing of every layer.
        processes: that share the weights.
    """

    layers: int = 32
    width: int = 4096
    inner: int = 11008
    heads: int = 32
    vocabulary: int = 32000
    length: int = 2048
    batch: int = 1
    recomputes: bool = False
    processes: int = 8

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's matrices."""
        return 4 * self.width**2 + 3 * self.width * self.inner

    @property
    def weights(self) -> int:
        """All weights, those of norms left out."""
        return self.layers * self.layer_weights + 2 * self.vocabulary * self.width

    @property
    def tokens(self) -> int:
        """Tokens of a process's batch."""
        return self.batch * self.length

    @property
    def map(self) -> int:
        """Positions of one attention map, B·H·T·T."""
        return self.batch * self.heads * self.length**2


# -- floating-point operations of a step, one process -----------------------------------------------------------------


def matrices(shape: Shape) -> int:
    """M: a forward's products with weights, 2 a token and weight; the table of embeddings is looked up."""
    return 2 * shape.tokens * (shape.layers * shape.layer_weights + shape.vocabulary * shape.width)


def attention(shape: Shape) -> int:
    """A: QKᵀ and its product with V in a forward, 4·T·C a token and layer; causality is not made use of."""
    return 4 * shape.tokens * shape.length * shape.width * shape.layers


def _recomputed(shape: Shape) -> int:
    """The forward of the layers once more; the last product of each is not repeated, since no backward needs it."""
    inside = shape.layers * (shape.layer_weights - shape.width * shape.inner)
    return 2 * shape.tokens * inside + attention(shape)


def plain(shape: Shape) -> int:
    """3 M + 3 A: the backward of a product is two products."""
    return 3 * (matrices(shape) + attention(shape)) + (_recomputed(shape) if shape.recomputes else 0)


def attributions(shape: Shape) -> int:
    """∂F/∂O · Vᵀ at every site: half of A."""
    return attention(shape) // 2


def probe(shape: Shape) -> int:
    """A forward, a backward without gradients of weights down to the first layer's O, and the attributions."""
    below = 2 * shape.tokens * 3 * shape.width**2  # the first layer's queries, keys and values
    backward = matrices(shape) - below + 2 * attention(shape) * (shape.layers - 1) // shape.layers
    again = _recomputed(shape) if shape.recomputes else 0
    return matrices(shape) + attention(shape) + backward + again + attributions(shape)


STEPS: dict[str, Callable[[Shape], int]] = {
    "plain": plain,
    "AD-DROP": lambda shape: plain(shape) + probe(shape),
    "AD-DROP, cross-tuned": lambda shape: plain(shape) + probe(shape) // 2,
}


# -- memory and communication of a process ----------------------------------------------------------------------------


def mask_bits(shape: Shape) -> int:
    """Bytes of the masks of all sites, from the probe to the end of the backward: a bit a position."""
    return shape.layers * shape.map // 8


def states(shape: Shape, bytes_each: int = 2) -> int:
    """Bytes that the masked attentions keep beyond plain ones: a query and an output more, (B, H, T, D) each.

    With checkpointing they are made again, as all that a layer keeps.
    """
    return 0 if shape.recomputes else 2 * shape.layers * shape.tokens * shape.width * bytes_each


def saved_bits(shape: Shape) -> int:
    """Bytes of the masks that the attentions save for their backward, beside those of `mask_bits`."""
    return 0 if shape.recomputes else mask_bits(shape)


#: bytes a position of one map while a site's candidates are ranked and drawn, p = 0.3: counted, see `count_ranking`
RANKING = 11.9


def gathered(shape: Shape) -> float:
    """Bytes that a process receives when all weights are gathered once, in bfloat16."""
    return 2 * shape.weights * (shape.processes - 1) / shape.processes


GATHERS = {"plain": (2, 1), "AD-DROP": (4, 1)}


# -- counting ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A decoder layer: causal self-attention that is a site, and a gated feed-forward network."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.heads, self.site = shape.heads, AttentionSite("decoder", "self", layer)
        self.qkv, self.out = linear(shape.width, 3 * shape.width), linear(shape.width, shape.width)
        self.gate_up, self.down = linear(shape.width, 2 * shape.inner), linear(shape.inner, shape.width)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """(B, T, C) to the same; valid is bool (T, T)."""
        q, k, v = (h.unflatten(-1, (self.heads, -1)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        if self.site.active:
            attended = regularized_attention(q, k, v, valid=valid, site=self.site)
        else:  # as frameworks do, without a mask
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Embeddings, layers, and the product with the vocabulary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.recomputes = shape.recomputes
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to logits (B, T, V)."""
        x = self.embed(ids)
        valid = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool, device=ids.device).tril()
        for layer in self.layers:
            x = checkpoint(layer, x, valid, use_reentrant=False) if self.recomputes else layer(x, valid)
        return self.head(x)


def step_of(shape: Shape, name: str) -> Callable[[], None]:
    """A step of `STEPS`, ready to be counted."""
    torch.manual_seed(0)
    model = Decoder(shape).train()
    ids = torch.randint(shape.vocabulary, (shape.batch, shape.length))
    regularizer = None
    if name != "plain":
        regularizer = ADDrop(sites="*")
        regularizer.attach(model)

    def step(epoch: int = 2) -> None:
        if regularizer is not None:
            regularizer.begin_epoch(epoch)
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        model.zero_grad()
        if regularizer is not None:
            regularizer.end_update()

    step(1)  # the probe is tried in the first plain forward
    return step


def count_operations(shape: Shape, name: str) -> int:
    """Floating-point operations of a step, as PyTorch counts them, with attention as two products."""
    step = step_of(shape, name)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


class Alive(TorchDispatchMode):
    """The most bytes of tensors that are alive at once, and those that are alive now, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    @property
    def now(self) -> int:
        """Bytes of what is still there."""
        return sum(size for reference, size in self.alive.values() if not reference.expired())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look what is there."""
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self.alive.setdefault(reference.cdata, (reference, tensor.untyped_storage().nbytes()))
        self.alive = {at: held for at, held in self.alive.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


def count_kept(shape: Shape, regularized: bool) -> int:
    """Bytes that a forward leaves for its backward, in fp32; of weights nothing."""
    torch.manual_seed(0)
    model, ids = Decoder(shape).train(), torch.randint(shape.vocabulary, (shape.batch, shape.length))
    regularizer = ADDrop(sites="*", cross_tuning="off", p=0.3 if regularized else 0.0)
    with regularizer.attach(model), Alive() as alive:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        held = alive.now
    return held if loss.requires_grad else 0


def count_ranking(shape: Shape) -> float:
    """Bytes a position of a map while a site's mask is made; the map itself is one of the tensors."""
    valid = torch.ones(shape.length, shape.length, dtype=torch.bool).tril()
    with Alive() as alive:
        attribution = torch.randn(shape.batch, shape.heads, shape.length, shape.length)
        sample_keep(attribution, valid, 0.3, 0.3)
    return alive.most / shape.map


# -- the page ---------------------------------------------------------------------------------------------------------


def tables(shape: Shape) -> dict[str, str]:
    """Operations, memory and communication of the shape, as Markdown."""
    lines = ["| step | TFLOP | × plain | with checkpointing | × plain |", "|---|---|---|---|---|"]
    again = replace(shape, recomputes=True)
    for name, operations in STEPS.items():
        cells = [f"{operations(s) / 1e12:.1f} | {operations(s) / plain(s):.2f}" for s in (shape, again)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| step | gathers of all weights | GB received | gradients scattered |", "|---|---|---|---|"]
    for name, (gathers, scatters) in GATHERS.items():
        lines.append(f"| {name} | {gathers} | {gathers * gathered(shape) / 1e9:.0f} | {scatters} |")
    lines += ["", "| memory of a process, beyond plain | MiB | with checkpointing |", "|---|---|---|"]
    for title, size in (
        ("masks of all sites, as bits, from the probe to the end of the update", mask_bits),
        ("what the attentions save for their backward: the same bits", saved_bits),
        ("and a query and an output each, in bfloat16", states),
        ("for a while: one site's mask is made, p = 0.3", lambda shape: RANKING * shape.map),
    ):
        lines.append(f"| {title} | {size(shape) / 2**20:,.0f} | {size(again) / 2**20:,.0f} |")
    return {"cost_model": "\n".join(lines)}


#: what is counted: of the form of the large one
SMALL = Shape(layers=3, width=64, inner=172, heads=4, vocabulary=100, length=96, batch=2)


def main() -> None:
    """Count, where asked to, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", action="store_true", help="compare the formulas with counts in small models")
    if parser.parse_args().count:
        for shape in (SMALL, replace(SMALL, recomputes=True), replace(SMALL, length=256, heads=2, batch=1)):
            for name in ("plain", "AD-DROP"):
                counted, told = count_operations(shape, name), STEPS[name](shape)
                print(f"{name:38} formula {told:>13,} counted {counted:>13,} {told / counted:.4f}")
        for shape in (SMALL, replace(SMALL, recomputes=True), replace(SMALL, length=512, batch=1)):
            counted = count_kept(shape, True) - count_kept(shape, False)
            told = mask_bits(shape) + saved_bits(shape) + states(shape, 4)
            print(f"kept for the backward: formula {told:,} counted {counted:,} bytes {told / counted:.3f}")
        for length in (256, 1024):
            print(f"ranking, length {length}: {count_ranking(Shape(heads=4, length=length)):.2f} bytes a position")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(Shape())), encoding="utf-8")


if __name__ == "__main__":
    main()
