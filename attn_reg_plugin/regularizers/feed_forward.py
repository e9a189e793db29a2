"""The feed-forward network of an attention's layer: the linear map that its output comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.options import OptionError

#: how a module calls the linear map that an adapter is added to, as PEFT's do
ADAPTED = "base_layer"


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
    width, path = _width(site.module), site.path
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
        behind = [name for name in maps if order.index(name) > order.index(site.path)]
        maps = behind or maps  # Conformers have one ahead of the attention, too
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
    raise OptionError("sites", f"the layer of {site.name} has no feed-forward network that hidden_cut could cut")


def _refuse_experts(site: AttentionSite, modules: Mapping[str, nn.Module]) -> None:
    """Refuse a layer whose tokens are routed to experts.

    Args:
        modules: of the layer, by their names in it.

    Raises:
        OptionError: one of them routes tokens, or is an expert.
    """
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
    if type(module).__name__ == "Conv1D":  # GPT-2's linear map, whose weight is (in, out)
        wide, narrow = module.weight.shape
        return wide, narrow
    return None


def _width(attention: nn.Module | None) -> int | None:
    """Of the states that an attention comes from: what its first linear map takes; None where it has none."""
    sizes = () if attention is None else map(_sizes, attention.modules())
    return next((size[0] for size in sizes if size is not None), None)


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
