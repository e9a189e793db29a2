"""The rows of `attn-reg bench`: a table, and a row for every registered method that it does not mention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_reg_plugin.regularizers import REGISTRY
from attn_reg_plugin.regularizers.base.registry import presets_of


@dataclass(frozen=True)
class Row:
    """A row of the benchmark: a training step and its budgets.

    Attributes:
        name, title: as `--methods` and as the table name it.
        kind: a key of `bench.measure.STEPS`, or `mean` of two other rows.
        method, options: the registered regularizer and its options; none for plain training.
        epoch: the epoch it is announced, for cross-tuning.
        primed: one step is made first, unmeasured, so that what a method does once is done.
        memory_options: put over `options` when memory is measured: less work with the same peak.
        updates: of the optimizer in a step; seconds are divided by it.
        of: the row that a `mean` averages with plain training.
        budget, memory_budget, published: the largest ratios allowed, and the published ratio of time.
        rare: so slow that it is measured in the first repeat only, without warm-up.
        families, dtypes: where it exists, and means anything; all if empty.
    """

    name: str
    title: str
    kind: str = "training"
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 2
    primed: bool = False
    memory_options: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 1
    of: str | None = None
    budget: float | None = None
    memory_budget: float | None = None
    published: str = ""
    rare: bool = False
    families: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def exists(self, family: str, dtype: str) -> bool:
        """Whether it can be measured there."""
        return (not self.families or family in self.families) and (not self.dtypes or dtype in self.dtypes)


#: published figures of AD-DROP: relative training times, cross-tuned, Yang et al. 2022
_GA, _GA_FIRST, _IGA = "3.58–4.50", "1.95", "99–126"
_ENCODER, _FIRST, _ALL = "encoder.self", "encoder.self[0]", "*"
#: updates of a round of AttendOut
ROUND = 8
#: where `*` is more than `encoder.self`
_TWO_STACKS = ("fairseq",)
_BF16 = {"probe_dtype": "bfloat16"}
_TOKENS = {"unit": "token", "p": 0.1, "q": 0.6}
_RD, _AA = {"attribution": "random"}, {"attribution": "attention"}
_JOINT = {"attribution": "integrated", "integrated_path": "joint", "integrated_steps": 20}
_BY_SITE = {**_JOINT, "integrated_path": "site"}
#: AD-DROP in every step: name -> title, sites, options, budget, budget and published figure of cross-tuning
_AD_DROP: dict[str, tuple[str, str, dict[str, Any], float | None, float | None, str]] = {
    "ad_drop": ("GA", _ENCODER, {}, 1.75, 1.38, _GA),
    "ad_drop_bf16": ("GA, bf16 probe", _ENCODER, _BF16, 1.30, 1.16, _GA),
    "tokens": ("GA, whole tokens", _ENCODER, _TOKENS, 1.55, None, ""),
    "tokens_bf16": ("GA, whole tokens, bf16 probe", _ENCODER, {**_TOKENS, **_BF16}, 1.25, None, ""),
    "first_layer": ("GA", _FIRST, {}, None, 1.35, _GA_FIRST),
    "random": ("RD", _ENCODER, _RD, None, None, ""),
    "attention": ("AA", _ENCODER, _AA, None, None, ""),
    "all_sites": ("GA", _ALL, {}, None, None, ""),
    "integrated_joint": ("IGA, m = 20, joint path", _ENCODER, _JOINT, None, 8.0, ""),
    "integrated": ("IGA, m = 20, per site", _ENCODER, _BY_SITE, None, 25.0, _IGA),
    "integrated_first": ("IGA, m = 20, per site", _FIRST, _BY_SITE, None, None, ""),
}


def _ad_drop() -> Iterator[Row]:
    """Rows of AD-DROP, and each one's mean with the plain step: half of the epochs of cross-tuning are plain."""
    for name, (title, sites, options, budget, tuned, published) in _AD_DROP.items():
        both: dict[str, Any] = {"memory_budget": None if "attribution" in options else 1.05}
        both["families"] = _TWO_STACKS if sites == _ALL else ()
        both["dtypes"] = ("float32",) if _BF16.items() <= options.items() else ()
        slow = {"memory_options": {"integrated_steps": 2}, "rare": True} if "integrated_steps" in options else {}
        chosen = {"sites": sites, "cross_tuning": "off", **options}
        yield Row(name, f"AD-DROP ({title}), {sites}", method="ad_drop", options=chosen, budget=budget, **both, **slow)
        yield Row(f"{name}_cross_tuned", "  cross-tuned", "mean", of=name, budget=tuned, published=published, **both)


#: a step of AttendOut is a whole round, whose end is counted with its share
_ROUND: dict[str, Any] = {"kind": "round", "method": "attend_out", "updates": ROUND}
_ROUND |= {"budget": 2.3, "memory_budget": 2.3, "published": "2"}
#: over some updates, as which attentions are dropped changes with every one; transformers computes queries and keys
#: before our function is reached, so there is nothing to save there
_DROPPED: dict[str, Any] = {"method": "attention_layer_drop", "updates": 4, "families": _TWO_STACKS}
_DROPPED |= {"budget": 1.0, "memory_budget": 1.0}
_OWN, _EVERY = {"sites": _ENCODER, "steps": ROUND}, {"sites": _ALL, "steps": ROUND}
ROWS: tuple[Row, ...] = (
    Row("plain", "plain"),
    Row("inactive", "attached, plain epoch", method="ad_drop", epoch=1, primed=True, budget=1.01),
    Row("naive", "AD-DROP (GA), encoder.self, in the paper's form", "naive"),
    Row("naive_cross_tuned", "  cross-tuned", "mean", of="naive", published=_GA),
    *_ad_drop(),
    Row("attend_out", "AttendOut, encoder.self", options=_OWN, **_ROUND),
    Row(
        "attend_out_shared",
        "AttendOut, encoder.self, shared embedding",
        options=_OWN | {"embedding": "shared"},
        **_ROUND,
    ),
    Row("attend_out_all", "AttendOut, *", options=_EVERY, families=_TWO_STACKS, **_ROUND),
    Row(
        "attention_layer_drop",
        "attention LayerDrop (p = 0.5), encoder.self",
        options={"sites": _ENCODER, "p": 0.5},
        **_DROPPED,
    ),
    Row("attention_layer_drop_all", "attention LayerDrop (p = 0.5), *", options={"sites": _ALL, "p": 0.5}, **_DROPPED),
)


def all_rows() -> list[Row]:
    """The table, and a training row for every preset of a method that has none there."""
    measured = {row.method for row in ROWS}
    others = {name: method for name, method in REGISTRY.items() if name not in measured}
    presets = ((name, preset) for name, method in others.items() for preset in presets_of(method))
    return [*ROWS, *(Row(preset.name, preset.title, method=name, options=preset.options) for name, preset in presets)]


def select_rows(names: Sequence[str] | None, family: str, dtype: str) -> list[Row]:
    """The rows called `names` and those they need, in the table's order; None takes all that exist.

    Raises:
        ValueError: an unknown row, or one that does not exist for this family and dtype.
    """
    every = {row.name: row for row in all_rows()}
    there = {name: row for name, row in every.items() if row.exists(family, dtype)}
    if names is None:
        return list(there.values())
    if not names:
        raise ValueError(f"--methods is empty; the methods are: {', '.join(there)}")
    wanted, chosen = list(names), set()
    while wanted:
        name = wanted.pop()
        if name not in every:
            raise ValueError(f"unknown method {name!r}; the methods are: {', '.join(there)}")
        if name not in there:
            raise ValueError(f"method {name!r} does not exist for --family {family} --dtype {dtype}")
        if name not in chosen:
            chosen.add(name)
            wanted += filter(None, ["plain", there[name].of])
    return [row for row in there.values() if row.name in chosen]
