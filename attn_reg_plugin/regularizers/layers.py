"""The layers that attentions stand in, and leaving one out of a forward; found and reached from the sites' paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Self

from torch import Tensor, nn

from attn_reg_plugin.attention.calls import AttentionCall, essence, graph_task, recomputed
from attn_reg_plugin.attention.sites import AttentionSite, all_sites
from attn_reg_plugin.regularizers.attachment import attachments_of
from attn_reg_plugin.regularizers.probing import same_randomness

#: what a method puts on `AttentionSite.plan`: whether the layer of these sites is left out of its call of this number
LayerPlan = Callable[[list[AttentionSite], int], bool]


class StandIn:
    """Stands in for a module's forward with its own, `forward`, from `install` to `remove`.

    No hook is used: torch's own encoder layer leaves its fast path in evaluation for modules with hooks, and no hook
    can keep a module from running.

    Attributes:
        module: whose forward.
    """

    module: nn.Module

    def install(self) -> Self:
        """Stand in."""
        self._inner, self._replaced = self.module.forward, vars(self.module).get("forward")
        self.module.forward = self.forward
        return self

    def remove(self) -> None:
        """Give the module its forward back."""
        if self._replaced is None:
            del self.module.forward
        else:
            self.module.forward = self._replaced

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, without the module's own forward: a pickle looks that up by its name, and would find this one."""
        state = dict(vars(self))
        if state.get("_replaced") is None:
            state.pop("_inner", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state.get("_replaced") is None:
            self._inner = MethodType(type(self.module).forward, self.module)


@dataclass(eq=False)
class LayerCall(AttentionCall):
    """One call of a layer; `uniform`: it is left out.

    Attributes:
        bare: what it gives, with the states taken out, if it is left out and does not run.
    """

    bare: tuple[type, int] | None = None


@dataclass(eq=False)
class Layer(StandIn):
    """A layer of a model that can be left out: its hidden states pass by it unchanged.

    Until it is known what a layer gives beside its hidden states, and where that is more than None (T5's
    first layer gives the position bias of all), it runs and only its hidden states are replaced; random numbers that it
    draws meanwhile count for nothing. So it does until it is known how often each attention in it runs: the sites are
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
    _inner: Callable[..., Any] | None = field(default=None, repr=False)
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
        if self.lead.plan is None or not self.module.training:
            return self._inner(*args, **kwargs)
        states = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)
        call = self._call(states)
        if call is None or not call.uniform:
            return self._run(call, states, args, kwargs)
        if call.bare is None:
            with same_randomness(states.device):
                outputs = self._run(call, states, args, kwargs)
            return states if isinstance(outputs, Tensor) else type(outputs)((states, *outputs[1:]))
        kind, rest = call.bare
        return states if kind is Tensor else kind((states, *[None] * rest))

    def _run(self, call: LayerCall | None, states: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, and learn whether it gives anything but states, and how often its attentions run."""
        first = call is not None and graph_task() == self._task  # a recomputed call counts no others
        before = {site: site.count for site in self._here(call.index) if site.active} if first else {}
        outputs = self._inner(*args, **kwargs)
        self._times.update({site: site.count - count for site, count in before.items()})
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

    def _call(self, states: Tensor | None) -> LayerCall | None:
        """This call; one that activation checkpointing repeats, as it was; None if a part of the model runs alone."""
        site = self.lead
        if site.plan is not self._plan:
            self._plan, self.calls, self._task = site.plan, [], graph_task()
            own = [one for sites in self.kinds for one in sites]
            every = dict.fromkeys(one for attachment in attachments_of(self.model) for one in attachment.sites)
            self._others = [one for one in every if one not in own and one.path.startswith(f"{self.path}.")]
        if graph_task() != self._task:
            return recomputed(self.calls, (states,))
        if site.over:
            return None
        call = LayerCall(site, len(self.calls), seen=essence((states,)))
        here = self._here(call.index)
        call.uniform = self._plan(here[: len(self.kinds)], call.index)
        if call.uniform and all(one in self._times for one in here if one.active):
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
    """The layers that `sites` stand in, in order.

    A site's layer is the outermost module around it that is called by a number and has no other attention of its kind.

    Args:
        model: the attached model.
        sites: some of its open sites.

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
    parts = site.path.split(".")
    for i, part in enumerate(parts[:-1]):
        path = ".".join(parts[: i + 1])
        alike = (other for other in every if (other.stack, other.kind) == (site.stack, site.kind))
        if part.isdigit() and {other.path for other in alike if other.path.startswith(f"{path}.")} == {site.path}:
            return path
    return None
