"""`attn-reg sweep`: search the settings of a method, beside plain training with the same budget.

The trials of the method are the combinations of a grid, or are drawn by Optuna. Plain training gets as many, each with
a seed of its own; the keys that both have, such as the learning rate, vary in it alike. Each trial is a run in a folder
under `out`, as those of `attn-reg compare` and `finetune` are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import OmegaConf

from attn_reg_plugin.configuration import read, setting
from attn_reg_plugin.experiments.running.flags import PLAIN
from attn_reg_plugin.experiments.steps import settings_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from attn_reg_plugin.experiments.comparison import Comparison
    from attn_reg_plugin.experiments.running.run import Run

#: sections of the file, each the settings of a comparison whose runs are the trials
BASES = ("finetune", "compare")
#: settings of a comparison that the sweep decides, and those that say what is searched on, and by what
DECIDED = ("out", "methods", "seeds", "jobs", "method_flags")
FIXED = ("task", "data", "cpu", "metric", "held_out")
#: trials of the method; what a trial is, in the folder of its run
MOST, TRIAL = 5_000, "trial.json"


@dataclass(frozen=True)
class Arm:
    """A side of a sweep, the method or plain training.

    Attributes:
        name: in tables.
        space: the keys that vary, with what their values are drawn from.
        trials: seed and values of each trial; without values they are drawn.
    """

    name: str
    space: Mapping[str, BaseDistribution]
    trials: Sequence[tuple[int, dict[str, Any]]]

    def row(self, number: int) -> str:
        """The name of a trial's run, as a method's in a comparison."""
        return PLAIN if self.name == PLAIN else f"trial-{number:03d}"

    def folder(self, number: int) -> str:
        """The folder of a trial's run, as that of a comparison's."""
        return f"{self.row(number)}-seed{self.trials[number][0]}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The settings of `attn-reg sweep`.

    Raises:
        ValueError: a key or a value that is not allowed; the sentence names the key.
    """

    GROUP: ClassVar[str] = "running"
    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg sweep examples/sweep/sweep.yaml",
        "attn-reg sweep examples/sweep/sweep.yaml --trials 40 --pruner median --jobs 2",
    )

    out: Path = setting("folder of the trials", metavar="FOLDER")
    finetune: dict[str, Any] | None = setting(
        "what is searched on: settings of `attn-reg finetune`", None, unflagged=True
    )
    compare: dict[str, Any] | None = setting("or settings of `attn-reg compare`", None, unflagged=True)
    method: Any = setting("what is searched: a name, in a file also `{like: NAME, option: value, ...}`", "ad_drop")
    space: dict[str, Any] | None = setting(
        "options of the method and settings of the training: `key: [values]`, or a range, `key: {log: [low, high]}`",
        None,
        unflagged=True,
    )
    trials: int = setting("trials, drawn by Optuna; 0: the whole grid", 0, within=f"[0, {MOST}]", metavar="N")
    seeds: tuple[int, ...] = setting("seeds of the method: of a grid all for each combination, else in turn", (1,))
    pruner: str = setting(
        "end hopeless trials early: after an epoch below the median of at least five others",
        "none",
        choices=("none", "median"),
    )
    jobs: int = setting("trials at a time; above 1 each of them has one thread", 1, within="[1, inf)", metavar="N")

    def __post_init__(self) -> None:
        """Check keys and values; data and models are looked at later."""
        if not self.space:
            raise ValueError(f"space is {self.space!r}, but must be a mapping, such as {{p: [0.1, 0.3, 0.5]}}")
        if wrong := [key for key in DECIDED if key in getattr(self, self.section)]:
            raise ValueError(f"{self.section}: {wrong[0]} is decided by the sweep; leave it out")
        counts = [len(given) for given in self.space.values() if isinstance(given, list)]
        if not self.trials and (count := math.prod(counts) * len(self.seeds)) > MOST:
            said = f"space has {count:,} trials in its grid, but at most {MOST:,} are possible"
            raise ValueError(f"{said}; take fewer values, or say by `trials` how many are drawn")
        self.comparison()  # refuse what is wrong in it, before anything is blamed on the space
        self.choices  # noqa: B018 (refuses values that are not allowed)

    @property
    def section(self) -> str:
        """The section of `BASES` that is given."""
        given = [section for section in BASES if getattr(self, section) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of the sections {' and '.join(BASES)}, given {len(given)}")
        return given[0]

    @property
    def _method(self) -> dict[str, Any]:
        method = {"like": self.method} if isinstance(self.method, str) else self.method
        if not isinstance(method, dict) or "like" not in method:
            raise ValueError(f"method is {method!r}, but must be a name, or {{like: NAME, option: value, ...}}")
        return method

    def comparison(self, values: Mapping[str, Any] | None = None, name: str = "method", **more: Any) -> Comparison:
        """The comparison of the method, or plain training, with some values of the space; `more` of the method."""
        content = {**getattr(self, self.section), "out": str(self.out), "jobs": self.jobs, "seeds": list(self.seeds)}
        content["methods"] = {name: {**({} if name == PLAIN else self._method), **more}}
        for key, value in (values or {}).items():
            (content if key in self.shared else content["methods"][name])[key] = value
        part = "space" if values else self.section
        try:
            return read(settings_of(self.section), OmegaConf.create(content), {}, Path(part))
        except ValueError as error:
            reason = str(error).removeprefix(f"{part}: ")
            part = "method" if reason.startswith("methods: ") and not values else part
            raise ValueError(f"{part}: {reason.removeprefix('methods: ').removeprefix('method: ')}") from None

    @functools.cached_property
    def shared(self) -> tuple[str, ...]:
        """The keys of the space that plain training has too, such as the learning rate."""
        options = self.comparison().selected()[0].settings
        fields = [entry.name for entry in dataclasses.fields(settings_of(self.section))]
        known = [*options, *(name for name in fields if name not in (*DECIDED, *FIXED))]
        if unknown := [key for key in self.space if key not in known]:
            raise ValueError(f"space: unknown key {unknown[0]!r}; the keys are: {', '.join(known)}")
        return tuple(str(key) for key in self.space if key not in options)

    @functools.cached_property
    def choices(self) -> dict[str, BaseDistribution]:
        """The keys that vary and what their values are drawn from, as method and training take them."""
        return {str(key): self._choice(str(key), given) for key, given in self.space.items()}

    def _choice(self, key: str, given: Any) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        ranges = {"log": functools.partial(FloatDistribution, log=True), "uniform": FloatDistribution}
        ranges["int"] = IntDistribution
        kind, values = next(iter(given.items())) if isinstance(given, dict) and len(given) == 1 else ("", given)
        if not isinstance(values, list) or kind not in ("", *ranges):
            forms = " or ".join(f"{{{kind}: [low, high]}}" for kind in ranges)
            raise ValueError(f"space: {key} is {given!r}, but must be a list of values, or {forms}")
        if kind and not self.trials:
            raise ValueError(f"trials is 0, but must say how many, since {key} has a range in space")
        taken = [self._taken(key, value) for value in values]
        try:
            if not kind:
                return CategoricalDistribution(taken)
            low, high = taken
            return ranges[kind](low, high)
        except ValueError as error:  # of Optuna's
            raise ValueError(f"space: {key} is {given!r}: {error}") from None

    def _taken(self, key: str, value: Any) -> Any:
        """A value as method or training take it; refused where they don't."""
        found = self.comparison({key: value})
        taken = getattr(found, key) if key in self.shared else found.selected()[0].value(key)
        return taken if isinstance(taken, bool | int | float | str) else str(taken)

    @functools.cached_property
    def arms(self) -> list[Arm]:
        """The method, and plain training with the same budget; plain training alone if that is what is searched."""
        trials = [(self.seeds[number % len(self.seeds)], {}) for number in range(self.trials)]
        if not trials:  # the last key varies fastest
            grid = itertools.product(*(one.choices for one in self.choices.values()), self.seeds)
            trials = [(seed, dict(zip(self.choices, values, strict=True))) for *values, seed in grid]
        space = {key: self.choices[key] for key in self.shared}
        shared = ({key: values[key] for key in space if key in values} for _, values in trials)
        own = itertools.chain(self.seeds, itertools.count(max(self.seeds) + 1))
        plain = Arm(PLAIN, space, [(next(own), values) for values in shared])
        name = str(self._method.get("title", self._method["like"]))
        return [plain] if self._method["like"] == PLAIN else [Arm(name, self.choices, trials), plain]

    def run_of(self, arm: Arm, number: int, values: Mapping[str, Any]) -> Run:
        """The run of a trial, as `attn-reg compare` or `finetune` makes it."""
        found = self.comparison(values, arm.row(number), title=f"{arm.name} {text_of(values)}".strip())
        (run,) = dataclasses.replace(found, seeds=(arm.trials[number][0],)).plan(found.selected())
        return dataclasses.replace(run, measured=False)

    def carry_out(self) -> int:
        """Do all trials that no other process does, and show the result: 0, 1 if any failed, 130 when interrupted."""
        from attn_reg_plugin.experiments.sweep.search import search

        return search(self)


def text_of(values: Mapping[str, Any]) -> str:
    """Values for titles: `p 0.1, q 0.3`."""
    shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in values.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items())
