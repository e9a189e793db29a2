"""HiddenCut: data augmentation inside the model (Chen, Shen, Chen & Yang, ACL 2021, arXiv 2106.00149).

A second pass of each example loses, in every layer, one contiguous span of the feed-forward network's output: these
positions of it are zero before the residual. Where the span begins is drawn among the tokens that receive the most
attention in that layer, summed over queries and averaged over heads (strategic sampling, section 3.2). The loss is

    CE(P) + CE(Q) + η · JS(P, Q),    JS(P, Q) = ½ [KL(P ‖ M) + KL(Q ‖ M)],    M = ½ (P + Q),

P the prediction of the whole pass and Q that of the cut one (equations 4 to 6 with one augmentation and γ = 1).
Lengths, rounding and the shortening of a span at the end are those of the authors' code.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall, generator_of, graph_task
from attn_reg_plugin.attention.masks import existing_keys
from attn_reg_plugin.attention.selection import all_sites
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base import Preset, option, register
from attn_reg_plugin.regularizers.base.hooks.attachment import StandIn
from attn_reg_plugin.regularizers.base.hooks.forward import Forward
from attn_reg_plugin.regularizers.base.options import OptionError
from attn_reg_plugin.regularizers.base.repeated_batch import PASSES, SeveralPasses
from attn_reg_plugin.regularizers.base.statistics import Quantity, Statistics

#: how a module calls the linear map that an adapter is added to, as PEFT's do
ADAPTED = "base_layer"


@register("hidden_cut")
@dataclass(eq=False)
class HiddenCut(SeveralPasses):
    """Train on each example whole and with spans of its hidden states cut out, and keep both predictions close.

    `sites` names the self-attentions in whose layers spans are cut. In a loop of one's own the loss is
    `regularizer.loss(...)`; fairseq and Trainer ask for it themselves. Of a regression the divergence is the squared
    difference of both predictions. A span has at least one token, and `top` names at least one; cut = 0 is plain
    training (one pass), bit for bit. The weight is the paper's η.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset("hidden_cut", "HiddenCut", {"sites": "encoder.self", "cut": 0.1, "top": 0.4, "weight": 1.0}),
    )
    logged: ClassVar[tuple[Quantity, ...]] = (
        Quantity("hidden_cut_divergence", "hidden_cut_items", "hidden_cut_js"),
        Quantity("tokens_cut", "tokens", "tokens_cut"),
    )

    uses: ClassVar[frozenset[str]] = frozenset({"map"})

    cut: float = option(0.1, "share of an example's tokens in a span, in [0, 1]", within="[0, 1]")
    top: float = option(0.4, "share of the most attended tokens where a span may begin, in [0, 1]", within="[0, 1]")
    weight: float = option(1.0, "weight of the divergence between whole and cut, at least 0", within="[0, inf)")

    def due(self) -> bool:
        """Always, unless nothing is cut."""
        return self.cut > 0

    def hooks(self, model: nn.Module, sites: list[AttentionSite]) -> list[Any]:
        """Put a cutter into the feed-forward network of every site's layer.

        Raises:
            ValueError: a site is no self-attention, or its layer has no feed-forward network of its own, or several.
        """
        if not self.due():
            return []
        every, found = all_sites(model), {}
        for site in sites:
            network = feed_forward_of(model, site, every)
            if network in found:
                raise ValueError(f"{site.name} and {found[network].name} share one feed-forward network; choose one")
            found[network] = site
        return [Cutter(module, site).install() for module, site in found.items()]

    def before_forward(self, forward: Forward) -> None:
        """Let every site watch its attention, to draw where its layer is cut."""
        super().before_forward(forward)
        for site in self.attached_sites:
            seed = int(torch.randint(2**62, ()))
            site.ask(look=Spans(self.cut, self.top, seed, self.statistics))

    def after_forward(self, outputs: Any) -> None:
        """As `SeveralPasses.after_forward`; a RuntimeError if a layer whose spans were drawn has not been cut."""
        super().after_forward(outputs)
        for site in self.attached_sites if outputs is not None else ():
            spans = site.request.look
            if isinstance(spans, Spans) and spans.drawn.keys() - spans.reached:
                raise RuntimeError(
                    f"hidden_cut: the forward ran {site.name} without the module that was taken for the end of its "
                    "layer's feed-forward network, so nothing was cut there; choose other sites"
                )

    def divergence(self, first: Tensor, second: Tensor) -> Tensor:
        """JS(P, Q) of each item, at most log 2."""
        first, second = first.log_softmax(-1), second.log_softmax(-1)
        middle = torch.logaddexp(first, second) - math.log(2.0)
        return (first.exp() * (first - middle) + second.exp() * (second - middle)).sum(-1) / 2


def drawn_spans(received: Tensor, real: Tensor, cut: float, top: float, generator: torch.Generator) -> Tensor:
    """Where each example is cut.

    Args:
        received: (B, S), the attention that each token receives.
        real: bool (B, S), True = no padding.
        cut, top: see `HiddenCut`.

    Returns:
        bool (B, S), True = cut: one span an example, which may end earlier where the tokens end.
    """
    count = real.sum(-1)
    length = (count * cut).floor().clamp(min=1)
    among = (count * top).floor().clamp(min=1)
    order = received.masked_fill(~real, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    chosen = (torch.rand(len(count), generator=generator, device=received.device) * among).long()
    start = order.gather(-1, chosen.unsqueeze(-1))
    places = torch.arange(received.size(-1), device=received.device)
    return (places >= start) & (places < start + length.unsqueeze(-1)) & real


@dataclass(eq=False)
class Spans:
    """A site's look at its map: draws what its layer loses.

    The first rows of a batch are the whole passes, the last share of rows is cut.

    Attributes:
        drawn: bool (B, S) by the number of a call, True = cut.
        reached: the calls whose spans came to the layer's feed-forward network.
    """

    cut: float
    top: float
    seed: int
    statistics: Statistics
    drawn: dict[int, Tensor] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)

    def __call__(self, call: AttentionCall, weights: Tensor, valid: Tensor | None) -> None:
        """Draw the spans of a call from its map, (B, H, T, S), once: activation checkpointing comes again.

        Raises:
            ValueError: there are more keys than tokens, as with a learned prefix.
        """
        if call.index in self.drawn:
            return
        rows, _, queries, keys = weights.shape
        if queries != keys:
            raise ValueError(f"hidden_cut: {call.site.name} has {keys} keys for {queries} tokens, as with a prefix")
        real = existing_keys(valid, (rows, keys), weights.device)
        received = (weights.float() * real[:, None, :, None]).sum(2).mean(1)  # not what padding attends to
        generator = generator_of(self.seed, call.index, weights.device)
        spans = drawn_spans(received, real, self.cut, self.top, generator)
        first = rows - rows // PASSES
        spans[:first] = False
        self.drawn[call.index] = spans
        self.statistics.add("tokens_cut", spans.sum().float())
        self.statistics.add("tokens", real[first:].sum().float())


@dataclass(eq=False)
class Cutter(StandIn):
    """Stands in for the forward of a feed-forward network's last map, and zeroes spans of its output."""

    module: nn.Module
    site: AttentionSite

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's output (B, T, C), (T, B, C) or (B·T, C), with zeros where it is cut.

        Raises:
            RuntimeError: the output has another shape.
        """
        outputs = self.inner(*args, **kwargs)
        site, spans, call = self.site, self.site.request.look, self.site.calls.current
        if not isinstance(spans, Spans) or call is None:
            return outputs
        spans.reached.add(call.index)
        alone = site.calls.over and graph_task() == -1  # a part of the model runs by itself
        if alone or not self.module.training:
            return outputs
        cut = spans.drawn[call.index]
        first = getattr(site.backend, "time_first", None)
        if first is not None and first(site):
            cut = cut.transpose(0, 1)
        if outputs.shape[:-1] not in (cut.shape, (cut.numel(),)):
            raise RuntimeError(
                f"hidden_cut: the feed-forward network of {site.name} gives {tuple(outputs.shape)}, which does not fit "
                f"its attention over {tuple(cut.shape)} tokens; choose other sites"
            )
        return outputs.masked_fill(cut.reshape(outputs.shape[:-1]).unsqueeze(-1), 0.0)


def feed_forward_of(model: nn.Module, site: AttentionSite, every: Iterable[AttentionSite]) -> nn.Module:
    """The last map of the feed-forward network that follows a self-attention: from more dimensions to the layer's.

    It is looked for around the attention, as far as no other self-attention of the stack is there. With an adapter it
    is the module that adds it.

    Args:
        every: all sites of the model.

    Raises:
        OptionError: the site is no self-attention; or there is no such map, or several, or a mixture of experts.
    """
    every = list(every)
    if site.kind != "self":
        raise OptionError("sites", f"{site.name} is no self-attention: hidden_cut cuts tokens of a layer's own input")
    others = {s.path for s in every if (s.stack, s.kind) == (site.stack, site.kind)} - {site.path}
    attentions = tuple(f"{s.path}." for s in every)
    # the width of the attention's states is that of its first linear map
    sizes = () if site.module is None else filter(None, map(_sizes, site.module.modules()))
    width, path = next((wide for wide, _ in sizes), None), site.path
    while path:
        path = path.rpartition(".")[0]
        around = f"{path}." if path else ""
        if any(other.startswith(around) for other in others):
            break
        inside = dict(model.get_submodule(path).named_modules(prefix=path))
        parts = {name: part for name, part in inside.items() if not f"{name}.".startswith(attentions)}
        _refuse_experts(site, {name.removeprefix(around): part for name, part in parts.items()})
        maps = [name for name, part in parts.items() if _narrows(part, width) and not _is_added(name, inside)]
        order = list(inside)
        maps = [n for n in maps if order.index(n) > order.index(site.path)] or maps  # Conformers have one ahead, too
        if len(maps) > 1:
            raise OptionError(
                "sites",
                f"the layer of {site.name} has several maps that a feed-forward network could end with "
                f"({', '.join(maps)}), and hidden_cut cannot tell them apart; choose other sites",
            )
        if maps:
            name = maps[0]
            while name.endswith(f".{ADAPTED}"):
                name = name.rpartition(".")[0]
            return inside[name]
    raise OptionError(
        "sites",
        f"the layer of {site.name} has no feed-forward network with more dimensions inside, which hidden_cut could cut",
    )


def _refuse_experts(site: AttentionSite, modules: Mapping[str, nn.Module]) -> None:
    """Refuse a layer whose `modules`, by their names in it, route tokens to experts, or are experts."""
    for name, module in modules.items():
        own, kind = name.rpartition(".")[2], type(module).__name__
        if own.startswith(("expert", "shared_expert")) or kind.endswith(("Experts", "MoE")):
            raise OptionError(
                "sites",
                f"the feed-forward network of {site.name} is a mixture of experts ({name or kind}), each of which sees "
                "some of the tokens, so hidden_cut cannot cut its output; choose other sites",
            )


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """From how many dimensions to how many a linear map goes; None of another module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    # GPT-2's linear map has a weight (in, out)
    return tuple(module.weight.shape) if type(module).__name__ == "Conv1D" else None


def _narrows(module: nn.Module, width: int | None) -> bool:
    """Whether it is a linear map to fewer dimensions: to the width of the layer's states, where that is known."""
    sizes = _sizes(module)
    return sizes is not None and sizes[0] > sizes[1] and width in (None, sizes[1])


def _is_added(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module is a part of an adapter: below one that has an adapted map, and not that map."""
    while "." in name:
        above, _, own = name.rpartition(".")
        if own != ADAPTED and hasattr(modules.get(above), ADAPTED):
            return True
        name = above
    return False
