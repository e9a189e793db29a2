"""Models small enough to evaluate literally: their attention is a site, or whatever a test puts in its place."""

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_reg_plugin import AttentionSite, regularized_attention
from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.masks import PackedMask
from tests.attention.literal import loop_weights

VOCABULARY, SIZE, HEADS, PAD = 13, 8, 2, 0
#: the sites of the translator, in order
EVERY = ["encoder.self[0]", "encoder.self[1]", *(f"decoder.{k}[{i}]" for i in range(2) for k in ("self", "cross"))]

#: takes (site name, query, key, value, valid, dropout_p) and returns (B, H, T, D)
Attend = Callable[[str, Tensor, Tensor, Tensor, Tensor, float], Tensor]


class TinyAttention(nn.Module):
    """Multi-head attention that holds a site; `attend`, if a test sets it, is called instead."""

    def __init__(self, stack: str, kind: str, layer: int, dropout: float) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.site = AttentionSite(stack, kind, layer)
        self.attend: Attend | None = None

    def forward(self, x: Tensor, memory: Tensor, valid: Tensor) -> Tensor:
        """(B, T, C), (B, S, C) and valid, broadcastable to (B, H, T, S), give (B, T, C)."""
        to_query, to_key, to_value, to_output = self.projections
        query, key, value = (
            project(states).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project, states in ((to_query, x), (to_key, memory), (to_value, memory))
        )
        dropout_p = self.dropout.p if self.dropout.training else 0.0
        if self.attend is not None:
            output = self.attend(self.site.name, query, key, value, valid, dropout_p)
        else:
            output = regularized_attention(query, key, value, valid=valid, site=self.site, dropout_p=dropout_p)
        return to_output(output.transpose(1, 2).flatten(-2))


class TinyLayer(nn.Module):
    """Self-attention, cross-attention in a decoder, and a smooth feed-forward network; norms after the residuals."""

    def __init__(self, stack: str, layer: int, dropout: float) -> None:
        super().__init__()
        kinds = ("self", "cross") if stack == "decoder" else ("self",)
        self.attentions = nn.ModuleList(TinyAttention(stack, kind, layer, dropout) for kind in kinds)
        self.feed_forward = nn.Sequential(nn.Linear(SIZE, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, SIZE))
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in (*kinds, "feed_forward"))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, valid: Tensor, memory: Tensor | None = None, there: Tensor | None = None) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = self.norms[0](x + self.dropout(self.attentions[0](x, x, valid)))
        if memory is not None:
            x = self.norms[1](x + self.dropout(self.attentions[1](x, memory, there)))
        return self.norms[-1](x + self.dropout(self.feed_forward(x)))


class TinyStack(nn.Module):
    """Embedding and layers; `skip` names layers to leave out, `checkpointed` recomputes them in the backward, by
    `reentrant` checkpointing, too."""

    def __init__(self, stack: str, layers: int, dropout: float, longest: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        self.position = nn.Embedding(longest, SIZE)
        self.layers = nn.ModuleList(TinyLayer(stack, layer, dropout) for layer in range(layers))
        self.checkpointed = False
        self.skip: set[int] = set()

    def forward(self, tokens: Tensor, valid: Tensor, *rest: Tensor) -> Tensor:
        """(B, T) to (B, T, C)."""
        x = self.embedding(tokens) + self.position.weight[: tokens.size(1)]
        for i, layer in enumerate(self.layers):
            if i in self.skip:
                continue
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(layer, x, valid, *rest, use_reentrant=self.checkpointed == "reentrant")
            else:
                x = layer(x, valid, *rest)
        return x


class TinyTranslator(nn.Module):
    """Encoder and decoder of `layers` layers each; sites encoder.self, decoder.self and decoder.cross."""

    def __init__(self, dropout: float = 0.0, layers: int = 2, longest: int = 16) -> None:
        super().__init__()
        self.encoder = TinyStack("encoder", layers, dropout, longest)
        self.decoder = TinyStack("decoder", layers, dropout, longest)
        self.output = nn.Linear(SIZE, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """(B, S) and (B, T) token ids to (B, T, V) logits."""
        there = source.ne(PAD)[:, None, None, :]
        memory = self.encoder(source, there)
        past = (
            target.ne(PAD)[:, None, None, :]
            & torch.ones(target.size(1), target.size(1), device=target.device).tril().bool()
        )
        return self.output(self.decoder(target, past, memory, there))


class TinyClassifier(nn.Module):
    """An encoder whose first state is classified; one class is regression."""

    def __init__(self, dropout: float = 0.0, classes: int = 3) -> None:
        super().__init__()
        self.encoder = TinyStack("encoder", 2, dropout)
        self.output = nn.Linear(SIZE, classes)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """(B, S) token ids to (B, number of classes)."""
        return self.output(self.encoder(tokens, tokens.ne(PAD)[:, None, None, :])[:, 0])


class Around(nn.Module):
    """A module of one's own around a model; keeps its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.outputs: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        self.outputs.append(self.model(*args, **kwargs))
        return self.outputs[-1]


class Materialized:
    """While entered, a tiny model's attention maps stand in the autograd graph; notes them, after dropout, by site.

    Args:
        model: a tiny model; its own attention comes back on leaving.
        keep: keep masks by site; the maps are over the positions that they leave.
        given: maps by site that are used in place of those computed.
    """

    def __init__(self, model: nn.Module, keep: dict | None = None, given: dict | None = None) -> None:
        self.model, self.keep, self.given = model, keep or {}, given or {}
        self.maps: dict[str, Tensor] = {}
        self.valid: dict[str, Tensor] = {}

    def __call__(self, name: str, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, dropout_p: float) -> Tensor:
        weights = F.dropout(loop_weights(query, key, valid=valid, keep=self.keep.get(name)), dropout_p)
        self.maps[name], self.valid[name] = weights, valid
        return self.given.get(name, weights) @ value

    def __enter__(self) -> Self:
        for module in attentions(self.model).values():
            module.attend = self
        return self

    def __exit__(self, *error: object) -> None:
        for module in attentions(self.model).values():
            module.attend = None


def asked_site(stack: str = "encoder", kind: str = "self", layer: int = 0, **asked: Any) -> AttentionSite:
    """A site of no model, of which a forward asks something."""
    site = AttentionSite(stack, kind, layer)
    site.ask(**asked)
    return site


def drawn(
    sampler: Callable[..., Tensor | PackedMask], call: AttentionCall, shape: Iterable[int], valid: Tensor | None = None
) -> Tensor:
    """Return what a site's sampler or factor gives a call, whose map has this shape."""
    made = sampler(call, tuple(shape), valid, torch.device("cpu"))
    return made.unpacked() if isinstance(made, PackedMask) else made


def keep_of(call: AttentionCall) -> Tensor:
    """The mask of a call that AD-DROP has attributed."""
    return call.request.masks[call.index].unpacked()


def attentions(model: nn.Module) -> dict[str, TinyAttention]:
    """The attention modules of a tiny model by the name of their site."""
    return {module.site.name: module for module in model.modules() if isinstance(module, TinyAttention)}


def sharpened(model: nn.Module, by: float = 3.0) -> nn.Module:
    """`model` with larger queries and keys, so that the attention maps are far from uniform."""
    with torch.no_grad():
        for module in attentions(model).values():
            for projection in module.projections[:2]:
                projection.weight.mul_(by)
    return model


def tokens(lengths: list[int], size: int, seed: int = 0) -> Tensor:
    """(B, size) token ids, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (len(lengths), size), generator=generator)
    return ids.masked_fill(torch.arange(size) >= torch.tensor(lengths).unsqueeze(-1), PAD)


def valid_of(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The valid mask of every site of the translator."""
    source, target = (ids.ne(PAD)[:, None, None, :] for ids in batch)
    causal = torch.ones(target.size(-1), target.size(-1)).tril().bool()
    kinds = {"encoder.self": source, "decoder.self": target & causal, "decoder.cross": source}
    return {name: kinds[name.split("[")[0]] for name in EVERY}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over the tokens that are not padding."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=PAD)
