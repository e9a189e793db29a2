"""The methods that `attn-reg compare` and `finetune` know: the registry's presets, and what they are compared with."""

from __future__ import annotations

import contextlib
import functools
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attn_reg_plugin.experiments.running.flags import PLAIN, UNTUNED, Flags, completed, parsed
from attn_reg_plugin.regularizers import REGISTRY, build, option_flag, options_of
from attn_reg_plugin.regularizers.base.registry import presets_of

#: settings of a configuration that any method has
_ANY_METHOD = ("like", "title", "flags")


@dataclass(frozen=True)
class Method:
    """A way to train: a row of a table.

    Attributes:
        name: as it was typed.
        title: in tables; the name, unless the configuration has another.
        regularizer: the registered method, several joined by `+`; None of plain training.
        flags: of fairseq-train.
        asked: the flags that were given for it; the others are the preset's.
    """

    name: str
    title: str
    regularizer: str | None
    flags: Flags
    asked: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def settings(self) -> dict[str, str]:
        """Option -> flag; of several methods that act together `METHOD_OPTION`, and `sites` of all that have sites."""
        names = self.regularizer.split("+") if self.regularizer else []
        return {
            (option.name if len(names) == 1 or option.name == "sites" else f"{name}_{option.name}"): option_flag(
                name, option.name
            )
            for name in sorted(names, key=lambda name: REGISTRY[name].needs_sites)
            for option in options_of(REGISTRY[name])
        }

    def value(self, setting: str) -> Any:
        """The value of a setting that was given."""
        return self.flags[self.settings[setting]]

    def among(self, common: Flags) -> dict[str, Any]:
        """The flags of a training that has `common` flags for every method: those of the method win.

        Those that nobody gave and that have the default do not: `--attn-sites '*'` of every training holds for a method
        of which no sites are said.
        """
        defaults = {**completed({"attn-reg": self.regularizer or ""}), "attn-reg": None}
        own = {
            flag: value
            for flag, value in self.flags.items()
            if flag in self.asked or flag not in common or defaults.get(flag) != str(value)
        }
        return {**common, **own}

    def with_flags(self, more: Flags) -> Method:
        """The method with more flags, which win."""
        return replace(self, flags={**self.flags, **more}, asked=self.asked | set(more))


#: what needs no regularizer: the model as it is, after an update that changes no bit of it; plain training; and the
#: model's own attention dropout, to which the registered method of that name adds
BASELINES = tuple(
    Method(name, name, None, {"attn-reg": "none", **flags})
    for name, flags in {
        UNTUNED: {"max-update": 1},
        PLAIN: {},
        "own_attention_dropout": {"attention-dropout": 0.3},
        "own_attention_dropout_0.1": {"attention-dropout": 0.1},
        "own_attention_dropout_0.2": {"attention-dropout": 0.2},
    }.items()
)


def known_methods(without: Iterable[str] = ()) -> dict[str, Method]:
    """The methods by name, those of the registry included."""
    found = {method.name: method for method in BASELINES}
    for name, regularizer in REGISTRY.items():
        for preset in presets_of(regularizer):
            flags = {option_flag(name, key): _for_flag(name, key, value) for key, value in preset.options.items()}
            found[preset.name] = Method(preset.name, preset.name, name, {"attn-reg": name, **flags})
    return {name: method for name, method in found.items() if name not in without}


def _for_flag(method: str, option: str, value: Any) -> Any:
    """An option's value as its flag takes it: a switch where the default is False, else `true` or `false`."""
    default = next(one.default for one in options_of(REGISTRY[method]) if one.name == option)
    return str(value).lower() if isinstance(value, bool) and default is not False else value


def select_methods(
    wanted: Any, overrides: Sequence[str] = (), table: Mapping[str, Method] | None = None
) -> list[Method]:
    """The methods asked for, in that order; what the registry or the configuration doesn't allow is refused.

    Args:
        wanted: names, with commas or as a list, several that act together joined by `+`; or a mapping of each name to
            its settings, see `_configured`.
        overrides: texts `NAME=FLAGS`; the flags win over the method's own.
        table: the methods there are, by default all.
    """
    table = known_methods() if table is None else table
    if isinstance(wanted, str):
        wanted = [name.strip() for name in wanted.split(",") if name.strip()]
    if not isinstance(wanted, Mapping | list | tuple | None):
        raise ValueError(f"methods is {wanted!r}, but must be names with commas, or a mapping of each to its settings")
    if not isinstance(wanted, Mapping):
        names = [str(name) for name in wanted or ()]
        if len(set(names)) != len(names):
            raise ValueError(f"--methods names a method twice: {','.join(names)}")
        wanted = dict.fromkeys(names)
    if not wanted:
        raise ValueError(f"--methods is empty; the methods are: {', '.join(table)}")
    chosen = {str(name): _configured(str(name), settings, table) for name, settings in wanted.items()}
    titled: dict[str, str] = {}
    for name, method in chosen.items():
        if titled.setdefault(method.title, name) != name:
            raise ValueError(f"methods: {titled[method.title]} and {name} have the same title, {method.title!r}")
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator:
            raise ValueError(f"--method-flags wants NAME=FLAGS, given {override!r}")
        if name not in chosen:
            raise ValueError(f"--method-flags names {name!r}, which is not among --methods {','.join(chosen)}")
        chosen[name] = chosen[name].with_flags(parsed("--method-flags", text))
    for name, method in chosen.items():
        acting = str(method.flags["attn-reg"]).split("+")
        owners = {flag: owner for flag, owner in _owners().items() if owner not in acting}
        if foreign := sorted(method.asked & set(owners)):
            raise ValueError(f"methods: {name} has --{foreign[0]}, which is of {owners[foreign[0]]}")
    return list(chosen.values())


@functools.cache
def _owners() -> dict[str, str]:
    """Flag of an option -> the method that it is of; without those that all methods share."""
    flags = {option_flag(name, one.name): name for name in REGISTRY for one in options_of(REGISTRY[name])}
    return {flag: name for flag, name in flags.items() if not flag.startswith("attn-")}


def _configured(name: str, settings: Any, table: Mapping[str, Method]) -> Method:
    """A method of the table with settings of its own: `like` (the method it is like, by default that of its name),
    `title`, `flags` (more flags of fairseq-train, in one text) and any option of the method."""
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        raise ValueError(f"methods: {name} is {settings!r}, but must be a mapping of settings, such as {{p: 0.3}}")
    base = find_method(str(settings.get("like", name)), table)
    if base.name == UNTUNED != name:
        raise ValueError(f"methods: {name} is like {UNTUNED}, which has no other name; give it a `title`")
    if not re.fullmatch(r"[^\W_][\w.+-]*", name):
        raise ValueError(f"methods: {name!r} isn't a name for a folder: a letter or digit, then these and '_-+.'")
    own = {}
    for key, value in settings.items():
        if key in _ANY_METHOD:
            continue
        if key not in base.settings:
            allowed = ", ".join([*_ANY_METHOD, *base.settings])
            raise ValueError(f"methods: {name}: unknown setting {key!r}; the settings are: {allowed}")
        own[base.settings[key]] = value
    found = replace(base.with_flags(own), name=name, title=str(settings.get("title", name)))
    if own:
        found = replace(found, flags=_checked(f"methods: {name}", found))
    return found.with_flags(parsed(f"methods: {name}: flags", str(settings.get("flags") or "")))


def _checked(where: str, method: Method) -> dict[str, Any]:
    """The flags of a method with its options converted and checked."""
    names = method.regularizer.split("+") if method.regularizer else []
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    flags = dict(method.flags)
    for name in names:
        hints = typing.get_type_hints(REGISTRY[name])
        for option in options_of(REGISTRY[name]):
            flag = option_flag(name, option.name)
            if flag in flags and (option.name != "sites" or REGISTRY[name].needs_sites):
                options[name][option.name] = value = _read(hints[option.name], flags[flag])
                flags[flag] = _for_flag(name, option.name, value)
    try:
        build("+".join(names), **(options if len(names) > 1 else options[names[0]]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return flags


def _read(hint: Any, value: Any) -> Any:
    """An option's value as the method takes it: a number may come as text, and YAML reads a bare `off` as False."""
    if hint is str:
        return "off" if value is False else str(value)
    if hint is bool and value in ("true", "false"):
        return value == "true"
    if hint in (int, float) and isinstance(value, str):
        with contextlib.suppress(ValueError):  # the method says what is wrong with it
            return hint(value)
    return value


def find_method(name: str, table: Mapping[str, Method]) -> Method:
    """A method of the table, or several joined by `+`, refused where they cannot act together."""
    parts = []
    for one in name.split("+"):
        if one not in table:
            raise ValueError(f"methods: unknown method {one!r}; the methods are: {', '.join(table)}")
        parts.append(table[one])
    if len(parts) == 1:
        return parts[0]
    if bare := next((part.name for part in parts if part.regularizer is None), None):
        raise ValueError(f"{name}: {bare} is no regularizer, so it combines with none; give its flags as `flags`")
    joined = "+".join(str(part.regularizer) for part in parts)
    sites = {str(part.flags["attn-sites"]) for part in parts if "attn-sites" in part.flags}
    if len(sites) > 1:
        raise ValueError(f"methods: {joined} has the sites {', '.join(sorted(sites))}; --attn-sites holds for all")
    flags = {flag: value for part in parts for flag, value in part.flags.items()} | {"attn-reg": joined}
    found = Method(name, name, joined, flags)
    return replace(found, flags=_checked("methods", found))
