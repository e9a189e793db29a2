"""LayerDrop: whole layers are left out in training (Fan, Grave & Joulin 2020, arXiv 1909.11556).

Each layer is left out with probability p, independently of the others, for the whole batch; its states pass by it on
the residual path. Nothing is rescaled, and in evaluation every layer runs. fairseq has it as `--encoder-layerdrop` and
`--decoder-layerdrop`; this is for models that do not have it, such as encoders of transformers and torch's layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall, drops, graph_task, recomputed
from attn_reg_plugin.attention.requests import LayerPlan, Request
from attn_reg_plugin.attention.selection import all_sites
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.base import Preset, Regularizer, option, register
from attn_reg_plugin.regularizers.base.hooks.attachment import StandIn, attachments_of
from attn_reg_plugin.regularizers.base.hooks.forward import Forward
from attn_reg_plugin.regularizers.base.hooks.put_back import same_randomness, unchanged


@register("layer_drop")
@dataclass(eq=False)
class LayerDrop(Regularizer):
    """Leave whole layers out, those that the sites stand in, each with probability p, drawn anew at every call.

    A layer is left out with all that is in it, whichever of its attentions was selected. The logged drop rate of a site
    is the share of calls in which its layer was left out. A layer that was left out has no gradient: under PyTorch's
    own data parallel, ask it to find unused parameters (fairseq: `--find-unused-parameters` with `--ddp-backend
    pytorch_ddp`; `legacy_ddp` needs nothing). p = 0.2 is the paper's, 0 is plain training, bit for bit.
    """

    presets: ClassVar[tuple[Preset, ...]] = (
        Preset("layer_drop", "LayerDrop 0.2", {"sites": "encoder.self", "p": 0.2}),
    )

    draws_last: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset({"layer"})

    p: float = option(0.2, "probability of leaving a layer out, in [0, 1]", within="[0, 1]")

    def hooks(self, model: nn.Module, sites: list[AttentionSite]) -> list[Any]:
        """Stand in for the forwards of the sites' layers.

        Raises:
            ValueError: a site stands in no layer that could be left out.
        """
        with ExitStack() as installed:
            layers = layers_of(model, sites)
            for layer in layers:
                installed.callback(layer.install().remove)
            installed.pop_all()
        return layers

    def check_shards(self, modules: list[nn.Module]) -> None:
        """Refuse layers in which modules are sharded by themselves: ranks that run them would wait for ever."""
        for layer in layers_of(self.model, self.attached_sites) if self.attached_sites else ():
            inner = [module for module in layer.module.modules() if module in modules and module is not layer.module]
            if inner:
                raise ValueError(
                    f"{self.name} leaves out the layer {layer.path}, in which {type(inner[0]).__name__} is sharded by "
                    "itself: ranks that run it would wait for those that don't; call fully_shard on whole layers"
                )

    def leaves_unused(self) -> bool:
        """A layer that was left out has no gradient."""
        return self.p > 0

    def before_forward(self, forward: Forward) -> None:
        """Draw a seed for each layer; its calls draw from it, recomputed ones stay as they were."""
        sites = self.attached_sites
        for site, seed in zip(sites, torch.randint(2**62, (len(sites),)).tolist(), strict=True):
            site.ask(layer=partial(self._left_out, seed))

    def _left_out(self, seed: int, sites: list[AttentionSite], call: int) -> bool:
        """Whether a layer is left out of its call number `call`, counted for the sites that it has then."""
        left_out = drops(self.p, seed, call)
        self.count_share(sites, float(left_out))
        return left_out


@dataclass(eq=False)
class LayerCall(AttentionCall):
    """One call of a layer, and whether it is left out."""

    left_out: bool = False
    #: type of its outputs and the number of those beside the states, if it is left out and does not run
    bare: tuple[type, int] | None = None


@dataclass(eq=False)
class Layer(StandIn):
    """A layer of a model that can be left out: its hidden states pass by it unchanged.

    Until it is known what a layer gives beside its hidden states, and where that is more than None (T5's
    first layer gives the position bias of all), it runs and only its hidden states are replaced; its buffers and random
    numbers are then as before. So it does until it is known how often each attention in it runs: the sites are
    told how many of their calls do not come.

    Attributes:
        path: the module's name in the model.
        module: the layer.
        kinds: its sites that are regularized, by kind; of a layer that several share, in the order of its calls.
        model: the attached model.
    """

    path: str
    module: nn.Module
    kinds: list[list[AttentionSite]]
    model: nn.Module = field(repr=False)
    calls: list[LayerCall] = field(default_factory=list, repr=False)
    _replaced: Any = field(default=None, repr=False)
    _plan: LayerPlan | None = field(default=None, repr=False)
    _task: int = field(default=-1, repr=False)
    #: what it gave last with the states taken out; unknown until it ran
    _bare: tuple[type, int] | None = field(default=None, repr=False)
    #: the sites in it that only other methods have, and how often each site ran in one call of the layer
    _others: list[AttentionSite] = field(default_factory=list, repr=False)
    _times: dict[AttentionSite, int] = field(default_factory=dict, repr=False)

    def install(self) -> Layer:
        """Stand in for the module's forward.

        Raises:
            ValueError: another layer does so already.
        """
        if isinstance(getattr(vars(self.module).get("forward"), "__self__", None), Layer):
            raise ValueError(f"the layer {self.path} is left out by another regularizer already; detach that one first")
        return super().install()

    @property
    def lead(self) -> AttentionSite:
        """The site that has the layer's plan."""
        return self.kinds[0][0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, or what it was given if it is left out.

        Raises:
            RuntimeError: the layer changes the shape of its states, so it can't be left out.
        """
        if self.lead.request.layer is None or not self.module.training:
            return self.inner(*args, **kwargs)
        states = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)
        call = self._call()
        if call is None or not call.left_out or states is None:
            return self._run(call, states, args, kwargs)
        if call.bare is None:
            with same_randomness(states.device), unchanged(self.module), ExitStack() as put_back:
                for site in filter(lambda one: one.active, self._here(call.index)):  # nothing is drawn for it
                    put_back.callback(site.put_in_place, site.request)
                    site.put_in_place(Request(uniform=lambda _: True))
                outputs = self._run(call, states, args, kwargs)
            return states if isinstance(outputs, Tensor) else type(outputs)((states, *outputs[1:]))
        kind, rest = call.bare
        return states if kind is Tensor else kind((states, *[None] * rest))

    def _run(self, call: LayerCall | None, states: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, and learn whether it gives anything but states, and how often its attentions run."""
        first = call is not None and graph_task() == self._task  # a recomputed call counts no others
        before = {site: site.calls.count for site in self._here(call.index) if site.active} if first else {}
        outputs = self.inner(*args, **kwargs)
        self._times.update({site: site.calls.count - count for site, count in before.items()})
        parts = (outputs,) if isinstance(outputs, Tensor) else outputs
        fits = isinstance(parts, tuple | list) and parts and isinstance(parts[0], Tensor) and states is not None
        if not fits or parts[0].shape != states.shape:
            took = "no states" if states is None else f"states of shape {tuple(states.shape)}"
            gave = f"shape {tuple(parts[0].shape)}" if fits else type(outputs).__name__
            raise RuntimeError(
                f"the layer {self.path} of {self.lead.name} takes {took} and gives {gave}, so it can't be left out; "
                "choose other sites"
            )
        bare = all(part is None for part in parts[1:]) and type(outputs) in (Tensor, tuple, list)
        self._bare = (type(outputs), len(parts) - 1) if bare else None
        return outputs

    def _call(self) -> LayerCall | None:
        """Find the call: new, or as it was where checkpointing repeats it; None if a part of the model runs alone."""
        site = self.lead
        if site.request.layer is not self._plan:
            self._plan, self.calls, self._task = site.request.layer, [], graph_task()
            own = [one for sites in self.kinds for one in sites]
            every = dict.fromkeys(one for attachment in attachments_of(self.model) for one in attachment.sites)
            self._others = [one for one in every if one not in own and one.path.startswith(f"{self.path}.")]
        if graph_task() != self._task:
            return recomputed(self.calls)
        if site.calls.over:
            return None
        call = LayerCall(site, len(self.calls))
        here = self._here(call.index)
        call.left_out = self._plan(here[: len(self.kinds)], call.index)
        if call.left_out and all(one in self._times for one in here if one.active):
            call.bare = self._bare
        for one in here if call.bare is not None else ():
            one.pass_by(self._times.get(one, 1))
        self.calls.append(call)
        return call

    def _here(self, index: int) -> list[AttentionSite]:
        """The sites of a call: its own, one of each kind, and those of other methods."""
        now = [sites[index % len(sites)] for sites in self.kinds]
        shared = len(self.kinds[0]) > 1
        return now + [site for site in self._others if not shared or site.layer == now[0].layer]


def layers_of(model: nn.Module, sites: Iterable[AttentionSite]) -> list[Layer]:
    """The layers that `sites`, open ones of the attached model, stand in, in order.

    A site's layer is the outermost module around it that is called by a number and has no other attention of its kind.

    Raises:
        ValueError: a site stands in no such layer, or shares its layer with one that isn't among `sites`.
    """
    every, found = all_sites(model), {}
    sites = list(sites)
    for site in sites:
        path = _layer_path(site, every)
        if path is None:
            raise ValueError(
                f"{site.name} ({site.path}) stands in no numbered layer that could be left out; choose other sites"
            )
        shared = [other.name for other in every if other.path == site.path and other not in sites]
        if shared:
            raise ValueError(f"{site.name} shares its layer with {', '.join(shared)}: choose all of them, or none")
        kinds = found.setdefault(path, {})
        kinds.setdefault((site.stack, site.kind), []).append(site)
    return [Layer(path, model.get_submodule(path), list(kinds.values()), model) for path, kinds in found.items()]


def _layer_path(site: AttentionSite, every: Iterable[AttentionSite]) -> str | None:
    """The path of the layer that `site` stands in."""
    alike = {other.path for other in every if (other.stack, other.kind) == (site.stack, site.kind)}
    for number in re.finditer(r"(?<![^.])\d+(?=\.)", site.path):
        path = site.path[: number.end()]
        if {other for other in alike if other.startswith(f"{path}.")} == {site.path}:
            return path
    return None
