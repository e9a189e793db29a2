"""The rows of `attn-reg bench`: a table, and a row for every registered method that it does not mention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attn_reg_plugin.regularizers import REGISTRY
from attn_reg_plugin.regularizers.base.registry import presets_of


@dataclass(frozen=True)
class Row:
    """A row of the benchmark: a training step.

    Attributes:
        name, title: as `--methods` and as the table name it.
        method, options: the registered regularizer and its options; none for plain training.
        naive: AD-DROP in the paper's form, which is no registered method.
        of: the row whose mean with plain training it is; nothing is measured.
        epoch: the epoch it is announced, for cross-tuning.
        updates: of the optimizer in a step; seconds are divided by it.
        rare: so slow that it is measured in the first repeat only, without warm-up.
        family, dtype: the only ones where it exists, and means anything; None: all.
    """

    name: str
    title: str
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    naive: bool = False
    of: str | None = None
    epoch: int = 2
    updates: int = 1
    rare: bool = False
    family: str | None = None
    dtype: str | None = None

    def exists(self, family: str, dtype: str) -> bool:
        """Whether it can be measured there."""
        return self.family in (None, family) and self.dtype in (None, dtype)

    @property
    def light(self) -> Row:
        """Less work with the same peak, for memory."""
        fewer = {"integrated_steps": 2} if "integrated_steps" in self.options else {}
        return replace(self, options={**self.options, **fewer})


_ENCODER, _FIRST, _ALL = "encoder.self", "encoder.self[0]", "*"
#: updates of a round of AttendOut
ROUND = 8
#: where `*` is more than `encoder.self`
_TWO_STACKS = "fairseq"
_BF16 = {"probe_dtype": "bfloat16"}
_TOKENS = {"unit": "token", "p": 0.1, "q": 0.6}
_JOINT = {"attribution": "integrated", "integrated_path": "joint", "integrated_steps": 20}
_BY_SITE = {**_JOINT, "integrated_path": "site"}


def _ad_drop(name: str, title: str, sites: str, **options: Any) -> Iterator[Row]:
    """AD-DROP in every step, and its mean with the plain step: half of the epochs of cross-tuning are plain."""
    both: dict[str, Any] = {"family": _TWO_STACKS if sites == _ALL else None}
    both["dtype"] = "float32" if _BF16.items() <= options.items() else None
    chosen, rare = {"sites": sites, "cross_tuning": "off", **options}, "integrated_steps" in options
    yield Row(name, f"AD-DROP ({title}), {sites}", "ad_drop", chosen, rare=rare, **both)
    yield Row(f"{name}_cross_tuned", "cross-tuned", of=name, **both)


def _attend_out(name: str, title: str, sites: str, **more: Any) -> Row:
    """A step of AttendOut: a whole round, whose end is counted with its share."""
    family = _TWO_STACKS if sites == _ALL else None
    options = {"sites": sites, "steps": ROUND, **more}
    return Row(name, f"AttendOut, {title}", "attend_out", options, updates=ROUND, family=family)


#: over some updates, as which attentions are dropped changes with every one; transformers computes queries and keys
#: before our function is reached, so there is nothing to save there
_DROPPED: dict[str, Any] = {"updates": 4, "family": _TWO_STACKS}
_LAYER_DROP = "attention LayerDrop (p = 0.5)"
ROWS: tuple[Row, ...] = (
    Row("plain", "plain"),
    Row("inactive", "attached, plain epoch", "ad_drop", epoch=1),
    Row("naive", "AD-DROP (GA), encoder.self, in the paper's form", naive=True),
    Row("naive_cross_tuned", "cross-tuned", of="naive"),
    *_ad_drop("ad_drop", "GA", _ENCODER),
    *_ad_drop("ad_drop_bf16", "GA, bf16 probe", _ENCODER, **_BF16),
    *_ad_drop("tokens", "GA, whole tokens", _ENCODER, **_TOKENS),
    *_ad_drop("tokens_bf16", "GA, whole tokens, bf16 probe", _ENCODER, **_TOKENS, **_BF16),
    *_ad_drop("first_layer", "GA", _FIRST),
    *_ad_drop("random", "RD", _ENCODER, attribution="random"),
    *_ad_drop("attention", "AA", _ENCODER, attribution="attention"),
    *_ad_drop("all_sites", "GA", _ALL),
    *_ad_drop("integrated_joint", "IGA, m = 20, joint path", _ENCODER, **_JOINT),
    *_ad_drop("integrated", "IGA, m = 20, per site", _ENCODER, **_BY_SITE),
    *_ad_drop("integrated_first", "IGA, m = 20, per site", _FIRST, **_BY_SITE),
    _attend_out("attend_out", _ENCODER, _ENCODER),
    _attend_out("attend_out_shared", f"{_ENCODER}, shared embedding", _ENCODER, embedding="shared"),
    _attend_out("attend_out_all", _ALL, _ALL),
    *(
        Row(name, f"{_LAYER_DROP}, {sites}", "attention_layer_drop", {"sites": sites, "p": 0.5}, **_DROPPED)
        for name, sites in (("attention_layer_drop", _ENCODER), ("attention_layer_drop_all", _ALL))
    ),
)


def all_rows() -> list[Row]:
    """The table, and a training row for every preset of a method that has none there."""
    measured = {row.method for row in ROWS}
    others = {name: method for name, method in REGISTRY.items() if name not in measured}
    presets = ((name, preset) for name, method in others.items() for preset in presets_of(method))
    return [*ROWS, *(Row(preset.name, preset.title, name, preset.options) for name, preset in presets)]


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
    for name in names:
        if name not in every:
            raise ValueError(f"unknown method {name!r}; the methods are: {', '.join(there)}")
        if name not in there:
            raise ValueError(f"method {name!r} does not exist for --family {family} --dtype {dtype}")
    chosen = {"plain", *names, *(every[name].of for name in names)}
    return [row for row in there.values() if row.name in chosen]
