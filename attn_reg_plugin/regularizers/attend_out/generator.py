"""AttendOut's generator, G-Net (Wu, Zhao & Zhang 2021, section 4.2): which attention to keep, from the tokens alone.

Token and position embeddings, then for every layer of the model the *same* single-head attention with residual and
layer norm and no feed-forward. Its raw scores of layer l are the logits of P(keep) of the model's layer l; one mask a
layer, shared by all heads. A decoder's stream attends causally over the target prefix and from target to source.

The attention that all layers share is

    scores = (X Wq + bq)(Y Wk + bk)ᵀ / √w                 the logits of P(keep)
    X'     = norm(X + softmax(scores)(Y Wv + bv) Wo + bo)

Since the weights are the same in every layer, their products are taken once per forward: X (Wq Wkᵀ) Yᵀ and
softmax(·) Y (Wv Wo) are the same function and the same gradients, with half as many multiplications by a weight. A
narrow attention (w well below C) is cheaper as it is written.

The generator learns by policy gradient (equation 5):

    (1/m) Σ over the batches and their examples of (1/(n l²)) Σ log P(d) · (r_t - b)

Its weights stay as they are for a whole round, so the gradient of a batch's term can be taken from the very pass that
its masks are drawn from, and multiplied by r_t - b once that is known. The gradient of an embedding table is kept as
that of the rows that were looked up.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_reg_plugin.attention.sites import AttentionSite


class Tokens(NamedTuple):
    """A batch of token ids (B, T), int64, and which of them are real: bool (B, T), False = padding."""

    ids: Tensor
    valid: Tensor


class Embeddings(NamedTuple):
    """A model's embedding tables: tokens (V, C), and learned positions (P, C) or None for sinusoids."""

    tokens: Tensor
    positions: Tensor | None = None


#: the weight and the bias of a linear map
Map = tuple[Tensor, Tensor]


class SharedAttention(nn.Module):
    """One single-head attention, used by every layer: shared Q, K, V, O, residual and layer norm.

    Args:
        states: C, of the states.
        memory: M, of what they attend to.
        width: w, of queries, keys and values; C is the paper's.
    """

    def __init__(self, states: int, memory: int, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(states, width), nn.Linear(memory, width)
        self.value, self.output = nn.Linear(memory, width), nn.Linear(width, states)
        self.norm = nn.LayerNorm(states)

    @property
    def folded(self) -> bool:
        """Whether the weights are multiplied first: a token costs C M multiplications, not (C + M) w."""
        width, states = self.query.weight.shape
        memory = self.key.in_features
        return states * memory < (states + memory) * width

    def maps(self) -> tuple[Map, Map | None, Map, Map | None]:
        """Return the maps of every layer: of the states to queries, of the memory to keys, whose products are scores,
        and to values, and of the mixed values. Folded, the keys are the memory and 1, and the last one does nothing."""
        query, key, value, output = ((m.weight, m.bias) for m in (self.query, self.key, self.value, self.output))
        query = tuple(one / math.sqrt(self.query.out_features) for one in query)
        if not self.folded:
            return query, key, value, output
        keys = torch.cat([key[0], key[1].unsqueeze(-1)], -1)
        folded = output[0] @ value[0], output[0] @ value[1] + output[1]
        return (keys.t() @ query[0], query[1] @ keys), None, folded, None


class Layers:
    """A shared attention in one forward of the generator, layer by layer.

    Keys and values are kept while the memory is the same tensor, as in cross attention.

    Args:
        attention: whose weights stay as they are meanwhile.
    """

    def __init__(self, attention: SharedAttention) -> None:
        self.norm, (self.query, self.key, self.value, self.output) = attention.norm, attention.maps()
        self._memory: Tensor | None = None
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def scores(self, states: Tensor, memory: Tensor) -> Tensor:
        """(B, T, C) and (B, S, M): the raw scores, (B, T, S)."""
        if memory is not self._memory:
            self._memory, self._value = memory, None
            self._key = F.pad(memory, (0, 1), value=1.0) if self.key is None else F.linear(memory, *self.key)
        return F.linear(states, *self.query) @ self._key.transpose(-1, -2)

    def attend(self, states: Tensor, scores: Tensor, valid: tuple[Tensor, Tensor]) -> Tensor:
        """The next states (B, T, C) from these and their `scores`; `valid` as `hidden_and_empty` gives it."""
        if self._value is None:
            self._value = F.linear(self._memory, *self.value)
        hidden, empty = valid
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(empty, 0.0)
        mixed = weights @ self._value
        return self.norm(states + (mixed if self.output is None else F.linear(mixed, *self.output)))


class Generator(nn.Module):
    """Proposes the attacker's masks.

    Args:
        sites: the model's sites that get a mask; every layer up to the highest of them is run.
        embeddings: the model's tables by stack, `encoder` and `decoder`; the same tensor in both is kept once.
        shared: use the model's tables as they are, frozen and without a copy, instead of own copies that learn.
        initial_keep: P(keep) where the raw score is 0, in (0, 1); 0.5 is the paper's form, logits = scores.
        width: of queries, keys and values, 0 = as wide as the embeddings, the paper's form.
    """

    def __init__(
        self,
        sites: Iterable[AttentionSite],
        embeddings: Mapping[str, Embeddings],
        shared: bool = False,
        initial_keep: float = 0.5,
        width: int = 0,
    ) -> None:
        super().__init__()
        self.sites = [(site.name, site.stack, site.kind, site.layer) for site in sites]
        widths = {stack: tables.tokens.size(1) for stack, tables in embeddings.items()}
        self.attention = nn.ModuleDict()
        for _, stack, kind, _ in self._needed():
            memory = widths["encoder" if kind == "cross" else stack]
            self.attention[f"{stack}_{kind}"] = SharedAttention(widths[stack], memory, width or widths[stack])
        self.shared, self.offset = shared, math.log(initial_keep / (1.0 - initial_keep))
        self._tables = dict(embeddings) if shared else {}
        self.tokens, self.positions = nn.ParameterDict(), nn.ParameterDict()
        if not shared:
            own: dict[int, nn.Parameter] = {}
            for stack, tables in embeddings.items():
                key = tables.tokens.data_ptr()
                own.setdefault(key, nn.Parameter(tables.tokens.detach().float().clone()))
                self.tokens[stack] = own[key]
                if tables.positions is not None:
                    self.positions[stack] = nn.Parameter(tables.positions.detach().float().clone())

    @property
    def stacks(self) -> list[str]:
        """The stacks whose tokens it reads."""
        read = ({stack, "encoder"} if kind == "cross" else {stack} for _, stack, kind, _ in self._needed())
        return sorted(set().union(*read))

    def _needed(self) -> list[tuple[str, str, str, int]]:
        """The attentions that have to run, in order: (name, stack, kind, layer)."""
        kinds = {"encoder": ["self"], "decoder": ["self"]}
        if any(kind == "cross" for _, _, kind, _ in self.sites):
            kinds["decoder"].append("cross")
        return [
            (f"{stack}.{kind}[{layer}]", stack, kind, layer)
            for stack, there in kinds.items()
            for layer in range(1 + max((site[3] for site in self.sites if site[1] == stack), default=-1))
            for kind in there
        ]

    def rows(self, tokens: Mapping[str, Tokens]) -> dict[str, Tensor]:
        """Look up for a batch the rows of the tables of tokens and of learned positions, (B, T, C), by
        `tokens.STACK` and `positions.STACK`. Positions count real tokens from 0."""
        found = {}
        for stack in self.stacks:
            table, learned = self._tables_of(stack)
            found[f"tokens.{stack}"] = F.embedding(tokens[stack].ids, table)
            if learned is not None:
                position = _positions(tokens[stack]).clamp(max=learned.size(0) - 1)
                found[f"positions.{stack}"] = F.embedding(position, learned)
        return found

    def embed(self, stack: str, tokens: Tokens, rows: Mapping[str, Tensor]) -> Tensor:
        """Token plus position embeddings, (B, T, C) in fp32, from the `rows` of a batch.

        Normalized, since models scale their tables differently: with their learned positions, or before sinusoids.
        """
        embedded = rows[f"tokens.{stack}"].float()
        if f"positions.{stack}" in rows:
            embedded = embedded + rows[f"positions.{stack}"].float()
            return F.layer_norm(embedded, embedded.shape[-1:])
        return F.layer_norm(embedded, embedded.shape[-1:]) + sinusoids(_positions(tokens), embedded.size(-1))

    def _tables_of(self, stack: str) -> tuple[Tensor, Tensor | None]:
        if not self.shared:
            return self.tokens[stack], self.positions.get(stack)
        tables = self._tables[stack]
        return tables.tokens.detach(), None if tables.positions is None else tables.positions.detach()

    def forward(self, tokens: Mapping[str, Tokens], rows: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The logits of P(keep) of each site, (B, T, S), by its name, from the tokens or their `rows`; in fp32."""
        with torch.autocast(next(iter(tokens.values())).ids.device.type, enabled=False):
            return self._logits(tokens, self.rows(tokens) if rows is None else rows)

    def _logits(self, tokens: Mapping[str, Tokens], rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        states = {stack: self.embed(stack, tokens[stack], rows) for stack in self.stacks}
        running = {name: Layers(attention) for name, attention in self.attention.items()}
        wanted, logits, needed = {name for name, *_ in self.sites}, {}, self._needed()
        kinds = {(stack, kind) for _, stack, kind, _ in needed}
        valid = {(stack, kind): hidden_and_empty(valid_pairs(stack, kind, tokens)) for stack, kind in kinds}
        for i, (name, stack, kind, _) in enumerate(needed):
            layers = running[f"{stack}_{kind}"]
            scores = layers.scores(states[stack], states["encoder"] if kind == "cross" else states[stack])
            if name in wanted:
                logits[name] = scores + self.offset if self.offset else scores
            if any(stack == of or (stack, later) == ("encoder", "cross") for _, of, later, _ in needed[i + 1 :]):
                states[stack] = layers.attend(states[stack], scores, valid[stack, kind])
        return logits


def _positions(tokens: Tokens) -> Tensor:
    """The number of each real token, from 0, int64 (B, T)."""
    return (tokens.valid.long().cumsum(-1) - 1).clamp(min=0)


def valid_pairs(stack: str, kind: str, tokens: Mapping[str, Tokens]) -> Tensor:
    """Mark the pairs (query, key) that exist, bool (B, T, S): both real tokens, and no future in a decoder's self."""
    queries = tokens[stack].valid
    keys = tokens["encoder"].valid if kind == "cross" else queries
    pairs = queries.unsqueeze(-1) & keys.unsqueeze(-2)
    return pairs.tril() if stack == "decoder" and kind == "self" else pairs


def hidden_and_empty(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pairs (B, T, S) are not attended to in rows that have any, and the rows (B, T, 1) that have none."""
    empty = ~pairs.any(-1, keepdim=True)
    return ~(pairs | empty), empty


def sinusoids(position: Tensor, width: int) -> Tensor:
    """Sinusoidal position embeddings (Vaswani et al. 2017): (B, T) positions give (B, T, C)."""
    half = width // 2
    frequency = torch.exp(torch.arange(half, device=position.device) * (-math.log(10000.0) / max(half - 1, 1)))
    angle = position.unsqueeze(-1).float() * frequency
    return F.pad(torch.cat([angle.sin(), angle.cos()], -1), (0, width - 2 * half))


def sample_masks(logits: Mapping[str, Tensor], temperature: float = 1.0) -> dict[str, Tensor]:
    """Keep masks, bool (B, T, S): keep = [logit + τ · logistic noise > 0], so P(keep) = σ(logit / τ).

    The difference of two Gumbel variables is logistic, so this is the Gumbel-max draw over keep and drop.
    """
    masks, alike = {}, {}
    for name, logit in logits.items():
        alike.setdefault(logit.shape, []).append(name)
    for names in alike.values():
        logit = torch.stack([logits[name] for name in names]).float()  # a coarser one would not have the probability
        uniform = torch.rand_like(logit).clamp_(1e-7, 1.0 - 1e-7)
        # not "> 0": a score that is NaN keeps its position, so that a broken generator proposes nothing
        masks.update(zip(names, (~(logit + temperature * torch.logit(uniform) <= 0)).unbind(), strict=True))
    return {name: masks[name] for name in logits}


def log_probability(logits: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """log P(d) of each position, (B, T, S), for masks drawn by `sample_masks`."""
    return -F.binary_cross_entropy_with_logits(logits / temperature, mask.float(), reduction="none")


#: tables of distances between tokens, which are no token's
_RELATIVE = re.compile(r"(^|\.)rel_|relative|distance")
#: and tables of positions, as BERT, fairseq and GPT-2 call theirs
_POSITIONS = re.compile(r"position|(^|[._])(wpe|pos)([._]|$)")


def embeddings_of(model: nn.Module, stacks: set[str], sites: list[AttentionSite]) -> dict[str, Embeddings]:
    """The embedding tables of each stack of `model`: token tables, and learned positions if it has any.

    A table belongs to a stack if its module's path says so, else to both; of several, the one with the most rows holds
    the tokens. Cross attention needs the encoder's as well.

    Raises:
        ValueError: the model has no `torch.nn.Embedding` for a stack.
    """
    if any(site.kind == "cross" for site in sites):
        stacks = stacks | {"encoder"}
    tables = {path: m for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Embedding)}
    tables = {path: m for path, m in tables.items() if not _RELATIVE.search(path)}
    found = {}
    for stack in sorted(stacks, reverse=True):
        other = "decoder" if stack == "encoder" else "encoder"
        mine = {p: m for p, m in tables.items() if stack in p} or {p: m for p, m in tables.items() if other not in p}
        words = [m for p, m in mine.items() if not _POSITIONS.search(p)]
        if not words:
            raise ValueError(f"no embedding found for the {stack} of {type(model).__name__}")
        table = max(words, key=lambda m: m.num_embeddings)
        learned = (m for p, m in mine.items() if _POSITIONS.search(p) and m.embedding_dim == table.embedding_dim)
        found[stack] = Embeddings(table.weight, next(map(_from_zero, learned), None))
    return found


def _from_zero(table: nn.Embedding) -> Tensor:
    """The rows of a model's learned positions from position 0 on: some tables begin with rows for padding."""
    first = getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
    return table.weight.detach()[first:]


@dataclass
class PolicyGradient:
    """The gradient of a batch's objective, before it is multiplied by r_t - b.

    Attributes:
        weights: of the attentions' parameters, in their order; None where there is none.
        rows: of the rows looked up in the generator's own tables, by `Generator.rows`' names.
    """

    weights: list[Tensor | None]
    rows: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return sum(one.nbytes for one in (*self.weights, *self.rows.values()) if one is not None)

    @staticmethod
    def bytes_of(generator: Generator, tokens: Mapping[str, Tokens]) -> int:
        """Return the memory that a gradient takes at most."""
        return sum(parameter.nbytes for parameter in generator.attention.parameters()) + sum(
            tokens[stack].ids.numel() * table.size(1) * 4
            for tables in (generator.tokens, generator.positions)
            for stack, table in tables.items()
        )

    def descend(self, generator: Generator, tokens: Mapping[str, Tokens], factor: Tensor) -> None:
        """Add `factor` (a scalar) times this to the gradients of the generator; `tokens` are the batch's."""
        for parameter, gradient in zip(generator.attention.parameters(), self.weights, strict=True):
            if gradient is None:
                continue
            scaled = gradient * factor
            parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)
        if self.rows:
            with torch.enable_grad():
                rows = generator.rows(tokens)
            torch.autograd.backward([rows[name] for name in self.rows], [one * factor for one in self.rows.values()])


def policy_gradient(
    generator: Generator, tokens: Mapping[str, Tokens], temperature: float, masks: Mapping[str, Tensor] | None = None
) -> tuple[Mapping[str, Tensor], PolicyGradient]:
    """Take the gradient of a batch's objective in one pass: for `masks`, or for those that are drawn from this pass.

    Returns:
        The keep masks, bool (B, T, S) by site, and the gradient.
    """
    with torch.enable_grad():
        rows = {name: one.detach().requires_grad_(one.requires_grad) for name, one in generator.rows(tokens).items()}
        logits = generator(tokens, rows)
        if masks is None:
            masks = sample_masks({name: logit.detach() for name, logit in logits.items()}, temperature)
        weights, learnt = list(generator.attention.parameters()), {k: v for k, v in rows.items() if v.requires_grad}
        with torch.autocast(next(iter(masks.values())).device.type, enabled=False):
            objective = policy_objective(generator, tokens, logits, masks, temperature)
            found = torch.autograd.grad(objective, [*weights, *learnt.values()], allow_unused=True)
    of_rows = zip(learnt, found[len(weights) :], strict=True)
    return masks, PolicyGradient(list(found[: len(weights)]), {k: v for k, v in of_rows if v is not None})


def policy_objective(
    generator: Generator,
    tokens: Mapping[str, Tokens],
    logits: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    temperature: float = 1.0,
) -> Tensor:
    """Equation 5 for one batch, without r_t - b: Σ over its examples of (1/(n l²)) Σ log P(d), a scalar.

    n l² counts the positions of an example's masks over all layers; only valid ones exist.

    Args:
        logits: `generator(tokens)`, (B, T, S) by site.
        masks: keep masks drawn from them, bool (B, T, S) by site.
    """
    total, count, alike = 0.0, 0.0, {}
    for name, stack, kind, _ in generator.sites:
        alike.setdefault((stack, kind), []).append(name)
    for (stack, kind), names in alike.items():
        pairs = valid_pairs(stack, kind, tokens)
        each = (torch.stack([of[name] for name in names]) for of in (logits, masks))
        total = total + (log_probability(*each, temperature) * pairs).sum((0, 2, 3))
        count = count + pairs.sum((1, 2)) * len(names)
    return (total / count.clamp(min=1)).sum()
