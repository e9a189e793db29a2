"""`attn-reg sweep`: search the settings of a method, beside plain training with the same budget.

The method's trials are the combinations of a grid, or are drawn by Optuna. Plain training gets as many trials, each
with a seed of its own, and the keys that it shares with the method, such as the learning rate, vary in it alike. Every
trial is a run in a folder of its own under `out`, as those of `attn-reg compare` and `finetune` are. Any number of
processes and machines that share a storage fill the same sweep; each waits until all trials are done, and shows the
result.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from attn_reg_plugin.configuration import read, setting
from attn_reg_plugin.experiments.comparison import Comparison, has_gpu
from attn_reg_plugin.experiments.jobs import Slots, at_a_time, visible_gpus
from attn_reg_plugin.experiments.methods import Method, find_method, known_methods, select_methods
from attn_reg_plugin.experiments.progress import Reporter
from attn_reg_plugin.experiments.report.differences import PLAIN
from attn_reg_plugin.experiments.runs_before import Run
from attn_reg_plugin.experiments.sweep_objective import objective_of
from attn_reg_plugin.experiments.sweep_report import Report
from attn_reg_plugin.experiments.sweep_space import (
    Arm,
    Dimension,
    Slot,
    equal_budget,
    read_dimension,
    slots_of,
    text_of,
)
from attn_reg_plugin.experiments.sweep_storage import load_optuna, open_storage, sqlite_url
from attn_reg_plugin.experiments.sweep_study import COMPLETE, PRUNED, SharedTrials
from attn_reg_plugin.experiments.sweep_work import Worker

#: section of the file -> (module, dataclass) of the comparison whose runs are the trials
BASES = {
    "finetune": ("attn_reg_plugin.experiments.fine_tuning", "FineTuning"),
    "compare": ("attn_reg_plugin.experiments.translation", "TranslationComparison"),
}
#: settings of a comparison that the sweep decides
DECIDED = ("out", "methods", "seeds", "jobs", "method_flags")
#: settings of a comparison that say what is searched on, and where
FIXED = ("task", "data", "cpu")
#: how the name of plain training's study ends
_OF_PLAIN = ", plain"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The settings of `attn-reg sweep`.

    Raises:
        ValueError: a key or a value that isn't allowed; the sentence names the key.
    """

    out: Path = setting("folder of the trials", metavar="FOLDER")
    finetune: Any = setting("what is searched on: settings of `attn-reg finetune`", None, unflagged=True)
    compare: Any = setting("or settings of `attn-reg compare`", None, unflagged=True)
    method: Any = setting("what is searched: a name, in a file also `{like: NAME, option: value, ...}`", "ad_drop")
    space: Any = setting(
        "options of the method and settings of the training: `key: [values]`, or a range, `key: {log: [low, high]}`",
        None,
        unflagged=True,
    )
    trials: int = setting("trials of the method, drawn by Optuna; 0: the whole grid", 0, within="[0, inf)", metavar="N")
    seeds: tuple[int, ...] = setting("seeds of the method: of a grid all for each combination, else in turn", (1,))
    pruner: str = setting("end hopeless trials early", "none", choices=("none", "median"))
    pruner_trials: int = setting("trials that must be complete before one is pruned", 5, within="[1, inf)")
    pruner_epochs: int = setting("epochs in which none is pruned", 1, within="[0, inf)")
    storage: str | None = setting(
        "URL of Optuna's storage, such as postgresql://...; the same for several machines (default: SQLite in --out)",
        None,
        metavar="URL",
    )
    name: str | None = setting(
        "of the study in the storage (default: that in the SQLite file, which begins as the name of --out)", None
    )
    jobs: int = setting("trials at a time; above 1 each of them has one thread", 1, within="[1, inf)", metavar="N")

    # -- what the file says -----------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        """Check keys and values; data and models are looked at later."""
        given = [section for section in BASES if getattr(self, section) is not None]
        if len(given) != 1:
            raise self._refusal("", f"give one of the sections {' and '.join(BASES)}, given {len(given)}")
        if not isinstance(self._settings, Mapping):
            raise self._refusal("", f"{self.section} is {self._settings!r}, but must be a mapping of settings")
        for key in DECIDED:
            if key in self._settings:
                raise self._refusal(self.section, f"{key} is decided by the sweep; leave it out")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) != len(self.seeds):
            raise self._refusal("", f"seeds is {','.join(map(str, self.seeds))}, but must be distinct whole numbers")
        self.base(), self._method()  # refuse what is wrong in them, before anything is blamed on the space
        self._check_space(self.dimensions)

    def _refusal(self, part: str, reason: str) -> ValueError:
        return ValueError(f"{part}: {reason}" if part else reason)

    @property
    def section(self) -> str:
        """The section of `BASES` that is given."""
        return next(section for section in BASES if getattr(self, section) is not None)

    @property
    def _settings(self) -> Any:
        return getattr(self, self.section)

    @property
    def _base_type(self) -> Any:
        module, name = BASES[self.section]
        return getattr(importlib.import_module(module), name)

    def base(self, changed: Mapping[str, Any] | None = None) -> Comparison:
        """The comparison, with some settings changed by the space."""
        key = json.dumps(changed or {}, default=str)
        if key not in self._read:
            self._read[key] = self._base(changed or {})
        return self._read[key]

    @functools.cached_property
    def _read(self) -> dict[str, Comparison]:
        """What `base` has given; most trials share their settings with others."""
        return {}

    def _base(self, changed: Mapping[str, Any]) -> Comparison:
        part = "space" if changed else self.section
        content = {**self._settings, "out": str(self.out), "jobs": self.jobs, **changed}
        try:
            return read(self._base_type, OmegaConf.create({self.section: content}), self.section, {}, Path(part))
        except ValueError as error:
            raise error if str(error).startswith(f"{part}: ") else self._refusal(part, str(error)) from None

    def _method(self, changed: Mapping[str, Any] | None = None, name: str = "method", title: str = "") -> Method:
        """The method with some options changed by the space."""
        given = {"like": self.method} if isinstance(self.method, str) else self.method
        if not isinstance(given, Mapping) or "like" not in given:
            raise self._refusal("", f"method is {given!r}, but must be a name, or {{like: NAME, option: value, ...}}")
        entry = {**given, **(changed or {}), **({"title": title} if title else {})}
        try:
            (found,) = select_methods({name: entry}, (), known_methods(self._base_type.without))
        except ValueError as error:
            reason = str(error).removeprefix(f"methods: {name}: ").removeprefix("methods: ")
            raise self._refusal("space" if changed else "method", reason) from None
        return found

    @property
    def like(self) -> str:
        """The known method that is searched."""
        return str(self.method if isinstance(self.method, str) else self.method["like"])

    @property
    def title(self) -> str:
        """Of the method in tables."""
        known = find_method(self.like, known_methods()).title
        return known if isinstance(self.method, str) else str(self.method.get("title", known))

    @functools.cached_property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The keys that vary, with their values as method and training take them."""
        if not isinstance(self.space, Mapping) or not self.space:
            raise self._refusal("", f"space is {self.space!r}, but must be a mapping, such as {{p: [0.1, 0.3, 0.5]}}")
        return tuple(self._dimension(str(key), given) for key, given in self.space.items())

    def _dimension(self, key: str, given: Any) -> Dimension:
        options = list(self._method().settings)
        settings = [entry.name for entry in dataclasses.fields(self._base_type)]
        settings = [name for name in settings if name not in (*DECIDED, *FIXED)]
        if key not in options and key not in settings:
            known = [f"{', '.join(options)} of {self.like}"] if options else []
            known += [f"{', '.join(settings)} of {self.section}"]
            raise self._refusal("space", f"unknown key {key!r}; the keys are: {'; '.join(known)}")
        try:
            found = read_dimension(key, given)
        except ValueError as error:
            raise self._refusal("space", str(error)) from None
        found = dataclasses.replace(found, shared=key not in options)
        taken = tuple(self._taken(found, value) for value in found.tried)
        if len(set(taken)) != len(taken):
            raise self._refusal("space", f"{key} is {given!r}, but must not have a value twice")
        return dataclasses.replace(found, values=taken) if found.values else found

    def _taken(self, dimension: Dimension, value: Any) -> Any:
        """A value as method or training take it; refused where they don't."""
        if dimension.shared:
            taken = getattr(self.base({dimension.key: value}), dimension.key)
        else:
            taken = self._method({dimension.key: value}).value(dimension.key)
        return taken if isinstance(taken, bool | int | float | str) else str(taken)

    def _check_space(self, dimensions: tuple[Dimension, ...]) -> None:
        """Each value alone is possible; check the number of trials, and what depends on several keys."""
        ranges = [dimension.key for dimension in dimensions if not dimension.values]
        if ranges and not self.trials:
            raise self._refusal("", f"trials is 0, but must say how many, since {ranges[0]} has a range in space")
        for slot in self.arms[0].slots:
            if slot.values is not None:
                self._parts(slot.values)

    def _parts(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values as options of the method and as settings of the training, checked together."""
        shared = {dimension.key for dimension in self.dimensions if dimension.shared}
        options = {key: value for key, value in values.items() if key not in shared}
        settings = {key: value for key, value in values.items() if key in shared}
        self._method(options), self.base(settings)
        return options, settings

    # -- the trials -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def arms(self) -> list[Arm]:
        """The method, and plain training with the same budget; plain training alone if that is what is searched."""
        dimensions = self.dimensions
        slots = slots_of(dimensions, self.seeds, self.trials)
        shared = tuple(dimension for dimension in dimensions if dimension.shared)
        plain = Arm(PLAIN, "plain", shared, equal_budget(slots, shared, self.seeds))
        return [plain] if self.like == PLAIN else [Arm(self.like, self.title, dimensions, slots), plain]

    def run_of(self, arm: Arm, slot: Slot, values: Mapping[str, Any]) -> Run:
        """The run of a trial, an ordinary one of `attn-reg compare` or `finetune`."""
        options, settings = self._parts(values)
        title = f"{arm.title} {text_of(values)}".strip()
        if arm.name == PLAIN:
            entries: dict[str, Any] = {PLAIN: {"title": title}}
            methods = select_methods(entries)
        else:
            methods = [self._method(options, f"trial-{slot.number:03d}", title)]
        comparison = dataclasses.replace(self.base(settings), seeds=(slot.seed,))
        (one,) = comparison.plan(methods)
        return one.for_search()

    def _tried(self, arm: Arm) -> list[tuple[str, dict[str, Any]]]:
        """Combinations that show whether all work, with the part of the file to blame: the first values, then each text
        in its turn; numbers are checked already."""
        first = {dimension.key: dimension.tried[0] for dimension in arm.dimensions}
        found = [(self.section, first)]
        for dimension in arm.dimensions:
            texts = [value for value in dimension.values[1:] if isinstance(value, str | bool)]
            found += [(f"space: {dimension.key}: {value}", {**first, dimension.key: value}) for value in texts]
        return found

    def try_all(self) -> Run:
        """Look at data and model, and try the commands; one of the runs.

        Raises:
            ValueError: a command cannot work.
            FileNotFoundError: data that is missing.
        """
        from attn_reg_plugin.experiments.checks import check_runs  # imports fairseq

        arm, first = self.arms[0], None
        for part, values in self._tried(arm):
            one = self.run_of(arm, arm.slots[0], values)
            first = first or one
            try:
                check_runs([one])
            except ValueError as error:
                raise self._refusal(part, str(error).partition(": ")[2] or str(error)) from None
        assert first is not None
        return first

    def agreed(self, one: Run) -> dict[str, Any]:
        """What all processes of a sweep must agree on, as json has it.

        Args:
            one: of its runs.
        """
        comparison, differing = self.base(), (*DECIDED, "cpu", "data", "model")
        fields = [entry.name for entry in dataclasses.fields(comparison) if entry.name not in differing]
        space = {dimension.key: dataclasses.asdict(dimension) for dimension in self.dimensions}
        content = {f"{self.section}.{name}": str(getattr(comparison, name)) for name in fields}
        content |= {name: value for name, value in one.settings().items() if name not in ("seed", "flags")}
        content |= {"method": self.method, "space": space, "seeds": self.seeds, "sampled": bool(self.trials)}
        return json.loads(json.dumps(content))

    def studies(self, maximize: bool) -> list[SharedTrials]:
        """The trials of each arm, in the storage."""
        storage = open_storage(self.storage or sqlite_url(self.out / "sweep.db"), self.out)
        optuna, pruner = load_optuna(), None
        if self.pruner == "median":
            pruner = optuna.pruners.MedianPruner(self.pruner_trials, self.pruner_epochs + 1)
        name = self._name_in(optuna.get_all_study_names(storage))
        names = {arm.name: name if arm.name != PLAIN else f"{name}{_OF_PLAIN}" for arm in self.arms}
        return [SharedTrials(storage, names[arm.name], arm, maximize, pruner) for arm in self.arms]

    def _name_in(self, studies: Sequence[str]) -> str:
        """The name of the sweep among those in the storage; the file in `out` has one, also where `out` was renamed.

        Raises:
            ValueError: that file holds another one, whose trials are in the folders that this one would use.
        """
        name, held = self.name or self.out.resolve().name, sorted({one.removesuffix(_OF_PLAIN) for one in studies})
        if self.storage or not held or name in held:
            return name
        if self.name:
            raise ValueError(f"--name is {name}, but {self.out} holds the trials of {held[0]}; give another --out")
        if len(held) > 1:
            raise ValueError(f"{self.out / 'sweep.db'} holds {' and '.join(held)}; say which by --name")
        return held[0]

    def carry_out(self) -> int:
        """Do all trials that no other process does, and show the result: 0, 1 if any failed, 130 when interrupted.

        Raises:
            ValueError: bad input, or nothing but failures, in one sentence.
            FileNotFoundError: data that is missing.
        """
        console, first = Console(file=sys.stdout), self.try_all()  # bound: a thread that tries a command replaces it
        objective = objective_of(first, getattr(self.base(), "metric", None))
        arms = self.studies(objective.maximize)
        for trials in arms:
            trials.agree(self.agreed(first))
        optuna, base = load_optuna(), self.base()
        gpus = Slots([] if base.cpu or self.jobs == 1 or not has_gpu() else visible_gpus(), self.jobs)
        left = sum(entry.state not in (COMPLETE, PRUNED) for trials in arms for entry in trials.entries())
        try:
            with Reporter(console, left) as reporter:
                worker = Worker(arms, self.run_of, objective, reporter, base.longest, gpus)
                at_a_time([worker.work] * self.jobs, self.jobs)
        except KeyboardInterrupt:
            console.print("interrupted; the same command goes on", highlight=False)
            return 130
        except optuna.exceptions.StorageInternalError as error:
            reason = (str(error.__cause__ or error).splitlines() or ["it does not answer"])[0]
            raise ValueError(f"the storage is lost, and the same command goes on: {reason}") from None
        report = Report([(trials.arm, trials.entries()) for trials in arms], objective)
        report.publish(console, self.out)
        return 1 if report.failed else 0
