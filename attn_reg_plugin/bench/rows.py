"""The rows of `attn-reg bench`: a table, and a row for every registered method that it does not mention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_reg_plugin.regularizers import REGISTRY
from attn_reg_plugin.regularizers.base.registry import presets_of

#: published figures of AD-DROP: relative training times, cross-tuned, Yang et al. 2022
_PAPER_GA, _PAPER_GA_FIRST, _PAPER_IGA = "3.58–4.50", "1.95", "99–126"


@dataclass(frozen=True)
class Row:
    """What is measured in one row.

    Attributes:
        name: as `--methods` names it.
        title: as the table names it.
        kind: a key of `bench.measure.STEPS`: `training`, `round`, `naive`, `generation`; or `mean` of two other rows,
            or `part` of another one, whose name it extends by `_` and a part that the step times.
        method, options: the registered regularizer and its options; none for plain training.
        epoch: the epoch it is announced, for cross-tuning.
        primed: an epoch in which one update is made first, unmeasured: what a method does once, such as trying its
            probe, or keeping what a later epoch needs.
        memory_options: put over `options` when memory is measured: less work with the same peak.
        updates: of the optimizer in a step; seconds are divided by it.
        of: with kind `mean`, the row averaged with `other`, by default `reference`; with kind `part`, the row it is a
            part of.
        reference: the row that ratios are relative to.
        budget, memory_budget: the largest ratios allowed, of time and of peak memory; None where there is none.
        published: the published ratio of time.
        rare: so slow that it is measured in the first repeat only, without warm-up.
        families: where it exists; all if empty.
        dtypes: dtypes of training in which it means anything; all if empty.
    """

    name: str
    title: str
    kind: str = "training"
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 2
    primed: int | None = None
    memory_options: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 1
    of: str | None = None
    other: str | None = None
    reference: str = "plain"
    budget: float | None = None
    memory_budget: float | None = None
    published: str = ""
    rare: bool = False
    families: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def exists(self, family: str, dtype: str) -> bool:
        """Whether it can be measured there."""
        return (not self.families or family in self.families) and (not self.dtypes or dtype in self.dtypes)

    @property
    def pair(self) -> tuple[str, str] | None:
        """The two rows that a mean is of."""
        return (self.of, self.other or self.reference) if self.kind == "mean" and self.of else None

    def needs(self) -> list[str]:
        """The rows it cannot do without."""
        return [name for name in (self.reference, self.of, self.other) if name and name != self.name]


def _ad_drop(name: str, title: str, sites: str = "encoder.self", **more: Any) -> Row:
    """AD-DROP in every step."""
    options = {"sites": sites, "cross_tuning": "off", **more.pop("options", {})}
    return Row(name, title, method="ad_drop", options=options, **more)


def _cross_tuned(of: str, title: str, **more: Any) -> Row:
    return Row(f"{of}_cross_tuned", title, kind="mean", of=of, **more)


def _kept(name: str, sites: str, families: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """AD-DROP that keeps what its plain epochs' backwards bring: such an epoch, one that uses it, and their mean."""
    shared = {"method": "ad_drop", "options": {"sites": sites, "probe": "kept", "on_miss": "plain"}, "primed": 1}
    record, use, title = f"{name}_record", f"{name}_use", f"AD-DROP, kept probe, {sites}"
    limits = {"budget": 1.10, "memory_budget": 1.08}
    return (
        Row(record, f"{title}: plain epoch, kept from", epoch=1, families=families, **limits, **shared),
        Row(use, f"{title}: regularized epoch", epoch=2, families=families, **limits, **shared),
        Row(
            name, "  cross-tuned", kind="mean", of=use, other=record, budget=1.06, memory_budget=1.08, families=families
        ),
    )


def _attribution(attribution: str, title: str, first: bool = False) -> tuple[Row, Row]:
    """AD-DROP with another attribution than the gradient, of all encoder layers or the first."""
    name, sites = (f"{attribution}_first", "encoder.self[0]") if first else (attribution, "encoder.self")
    row = _ad_drop(name, f"AD-DROP ({title}), {sites}", sites, options={"attribution": attribution})
    return row, _cross_tuned(name, "  cross-tuned")


def _attend_out(
    name: str,
    title: str,
    sites: str = "encoder.self",
    families: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Row, ...]:
    """AttendOut, round by round, and the parts of a round."""
    row = Row(
        name,
        title,
        kind="round",
        method="attend_out",
        options={"sites": sites, "steps": ROUND, **options},
        updates=ROUND,
        budget=2.3,
        memory_budget=2.3,
        published="2",
        families=families,
    )
    parts = (Row(f"{name}_{p}", f"  {what}", kind="part", of=name, families=families) for p, what in _PARTS.items())
    return row, *parts


def _attention_layer_drop(name: str, sites: str, families: tuple[str, ...]) -> Row:
    """Attention LayerDrop, over some updates: which attentions are dropped changes with every one.

    transformers computes queries and keys before our function is reached, so there is nothing to save there.
    """
    options = {"sites": sites, "p": 0.5}
    title = f"attention LayerDrop (p = 0.5), {sites}"
    return Row(
        name,
        title,
        method="attention_layer_drop",
        options=options,
        updates=4,
        budget=1.0,
        memory_budget=1.0,
        families=families,
    )


#: updates of a round of AttendOut
ROUND = 8
#: the parts of a round, in the order of the table
_PARTS = {
    "attacker": "attacker: updates with the masks",
    "defender": "defender: updates",
    "masks": "generator: drawing the masks, with their gradient",
    "generator": "generator: update, once per round",
    "evaluation": "evaluation of both, once per round",
    "settle": "copying the winner, once per round",
}
#: where `*` is more than `encoder.self`
_TWO_STACKS = ("fairseq", "torch")
_BF16 = {"probe_dtype": "bfloat16"}
_JOINT = {"attribution": "integrated", "integrated_path": "joint", "integrated_steps": 20}
_BY_SITE = {**_JOINT, "integrated_path": "site"}
_FEW = {"integrated_steps": 2}

ROWS: tuple[Row, ...] = (
    Row("plain", "plain"),
    Row("inactive", "attached, plain epoch", method="ad_drop", epoch=1, primed=1, budget=1.01),
    Row("naive", "AD-DROP (GA), encoder.self, in the paper's form", kind="naive"),
    _cross_tuned("naive", "  cross-tuned", published=_PAPER_GA),
    _ad_drop("ad_drop", "AD-DROP (GA), encoder.self", budget=1.75, memory_budget=1.05),
    _cross_tuned("ad_drop", "  cross-tuned", budget=1.38, memory_budget=1.05, published=_PAPER_GA),
    _ad_drop(
        "ad_drop_bf16",
        "AD-DROP (GA), encoder.self, bf16 probe",
        options=_BF16,
        budget=1.30,
        memory_budget=1.05,
        dtypes=("float32",),
    ),
    _cross_tuned(
        "ad_drop_bf16",
        "  cross-tuned",
        budget=1.16,
        memory_budget=1.05,
        published=_PAPER_GA,
        dtypes=("float32",),
    ),
    _ad_drop("first_layer", "AD-DROP (GA), encoder.self[0]", "encoder.self[0]", memory_budget=1.05),
    _cross_tuned("first_layer", "  cross-tuned", budget=1.35, memory_budget=1.05, published=_PAPER_GA_FIRST),
    *_kept("kept", "encoder.self"),
    *_kept("kept_all", "*", families=_TWO_STACKS),
    *_attribution("random", "RD"),
    *_attribution("random", "RD", first=True),
    *_attribution("attention", "AA"),
    *_attribution("attention", "AA", first=True),
    _ad_drop("all_sites", "AD-DROP (GA), *", "*", memory_budget=1.05, families=_TWO_STACKS),
    _cross_tuned("all_sites", "  cross-tuned", memory_budget=1.05, families=_TWO_STACKS),
    _ad_drop("integrated_joint", "AD-DROP (IGA, m = 20, joint path)", options=_JOINT, memory_options=_FEW, rare=True),
    _cross_tuned("integrated_joint", "  cross-tuned", budget=8.0),
    _ad_drop("integrated", "AD-DROP (IGA, m = 20, per site)", options=_BY_SITE, memory_options=_FEW, rare=True),
    _cross_tuned("integrated", "  cross-tuned", budget=25.0, published=_PAPER_IGA),
    _ad_drop(
        "integrated_bf16",
        "AD-DROP (IGA, m = 20, per site, bf16 probe)",
        options={**_BY_SITE, **_BF16},
        memory_options=_FEW,
        rare=True,
        dtypes=("float32",),
    ),
    _cross_tuned("integrated_bf16", "  cross-tuned", budget=25.0, published=_PAPER_IGA, dtypes=("float32",)),
    _ad_drop(
        "integrated_first",
        "AD-DROP (IGA, m = 20), encoder.self[0]",
        "encoder.self[0]",
        options=_BY_SITE,
        memory_options=_FEW,
        rare=True,
    ),
    _cross_tuned("integrated_first", "  cross-tuned"),
    *_attend_out("attend_out", "AttendOut, encoder.self"),
    *_attend_out("attend_out_shared", "AttendOut, encoder.self, shared embedding", embedding="shared"),
    *_attend_out("attend_out_all", "AttendOut, *", "*", families=_TWO_STACKS),
    *_attend_out("attend_out_narrow", "AttendOut, *, generator 64 wide", "*", families=_TWO_STACKS, generator_width=64),
    _attention_layer_drop("attention_layer_drop", "encoder.self", _TWO_STACKS),
    _attention_layer_drop("attention_layer_drop_all", "*", _TWO_STACKS),
    Row("generation", "beam search, plain", kind="generation", reference="generation", families=("fairseq",)),
    Row(
        "generation_attached",
        "beam search, attached",
        kind="generation",
        method="ad_drop",
        reference="generation",
        budget=1.01,
        families=("fairseq",),
    ),
)


def all_rows() -> list[Row]:
    """The table, and a training row for every preset of a method that has none there."""
    measured = {row.method for row in ROWS}
    others = {name: method for name, method in REGISTRY.items() if name not in measured}
    presets = ((name, preset) for name, method in others.items() for preset in presets_of(method))
    return [*ROWS, *(Row(one.name, one.title, method=name, options=one.options) for name, one in presets)]


def select_rows(names: Sequence[str] | None, family: str, dtype: str) -> list[Row]:
    """The rows called `names`, with those they need and their parts, in the table's order; None takes all that exist.

    Raises:
        ValueError: an unknown row, or one that does not exist for this family and dtype.
    """
    rows = all_rows()
    there = {row.name: row for row in rows if row.exists(family, dtype)}
    if names is None:
        return list(there.values())
    wanted, chosen = list(names), set()
    if not wanted:
        raise ValueError(f"--methods is empty; the methods are: {', '.join(there)}")
    while wanted:
        name = wanted.pop()
        if name not in {row.name for row in rows}:
            raise ValueError(f"unknown method {name!r}; the methods are: {', '.join(there)}")
        if name not in there:
            raise ValueError(f"method {name!r} does not exist for --family {family} --dtype {dtype}")
        if name not in chosen:
            chosen.add(name)
            wanted += there[name].needs()
    return [row for row in there.values() if row.name in chosen or (row.kind == "part" and row.of in chosen)]
