"""The methods that `attn-reg compare` and `finetune` know: the registry's presets, and what they are compared with."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_reg_plugin.regularizers import REGISTRY, Regularizer, build, options_of
from attn_reg_plugin.regularizers.base.registry import Preset, presets_of

#: The fairseq task every method is trained with; with `--attn-reg none` it is plain translation.
TASK = "attn_reg_translation"

#: The method that doesn't train: one update with a learning rate of zero, which changes no bit of the model that the
#: training starts from, and validates and keeps it like the others.
UNTUNED = "untuned"
START = "--finetune-from-model"
OWN_DROPOUT = "--attention-dropout"
#: what a configuration may say of any method
_ANY_METHOD = ("like", "title", "flags")


@dataclass(frozen=True)
class Method:
    """One way to train: its name, its title in tables, and its flags of fairseq-train.

    Attributes:
        regularizer, options: the registered method behind it and its options; none behind plain training.
        earlier: see `Preset`.
        together: settings that have the preset's values and mean something together, see `Preset`.
        asked: the names of the flags that were given for it.
    """

    name: str
    title: str
    flags: tuple[str, ...]
    regularizer: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    earlier: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    together: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    asked: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    def among(self, common: Sequence[str]) -> list[str]:
        """Flags of every training and then its own, which win, but for those that nobody gave and that have the
        default: `--attn-sites '*'` of every training holds for a method of which no sites are said. Settings of a
        preset that mean something together go where one of them is a flag of every training."""
        names = {word.partition("=")[0] for word in common if word.startswith("--")}
        together = {_flag(*self.settings[name]) for name in self.together}
        words = list(self.flags)
        if (given := sorted(names & together)) and not self.asked & together:
            words = list(_with_flags(self, given).flags[: -len(given)])
        names -= self.asked
        for name in self.regularizer.split("+") if self.regularizer else ():
            for option in options_of(REGISTRY[name]):
                default = fairseq_flags(name, {option.name: option.default})[2:]
                if default and default[0] in names and default[0] in words:
                    place = words.index(default[0])
                    if words[place : place + len(default)] == default:
                        del words[place : place + len(default)]
        return [*common, *words]

    @property
    def settings(self) -> dict[str, tuple[str, str]]:
        """The names of its settings, each with the regularizer and the option that it is: of several regularizers that
        act together `METHOD_OPTION`, and `sites` of all that have sites."""
        names = self.regularizer.split("+") if self.regularizer else []
        return {
            (option.name if len(names) == 1 or option.name == "sites" else f"{name}_{option.name}"): (name, option.name)
            for name in sorted(names, key=lambda name: REGISTRY[name].needs_sites)
            for option in options_of(REGISTRY[name])
        }

    def value(self, setting: str) -> Any:
        """The value of one of its settings that was given."""
        name, option = self.settings[setting]
        return (self.options[name] if "+" in str(self.regularizer) else self.options)[option]


def _without_regularizer(name: str, title: str, *flags: str) -> Method:
    return Method(name, title, ("--attn-reg", "none", *flags))


def _own_dropout(ending: str, p: str) -> Method:
    """The model's own attention dropout set to p by fairseq's flag; the registered method adds to it."""
    name = f"attention_dropout{ending}"
    method = _without_regularizer(f"own_{name}", f"own {name.replace('_', ' ')}", OWN_DROPOUT, p)
    return dataclasses.replace(method, earlier=(name,))


#: what needs no regularizer
BASELINES = (
    _without_regularizer(UNTUNED, "untuned", "--max-update", "1"),
    _without_regularizer("plain", "plain"),
    _own_dropout("", "0.3"),
    _own_dropout("_0.1", "0.1"),
    _own_dropout("_0.2", "0.2"),
)


def known_methods(without: Iterable[str] = ()) -> dict[str, Method]:
    """The methods by name, those of the registry included."""
    found = {method.name: method for method in BASELINES}
    for name, regularizer in REGISTRY.items():
        found |= {preset.name: _of_preset(name, preset) for preset in presets_of(regularizer)}
    return {name: method for name, method in found.items() if name not in without}


def _of_preset(name: str, preset: Preset) -> Method:
    flags = tuple(fairseq_flags(name, preset.options))
    return Method(preset.name, preset.title, flags, name, preset.options, preset.earlier, preset.together)


def fairseq_flags(name: str, options: Mapping[str, Any]) -> list[str]:
    """The flags of fairseq-train for a registered method with these options.

    Options that all methods share are `--attn-OPTION`, the others `--METHOD-OPTION`; see `with_attn_reg`. Of several
    methods that act together, `name` is their names joined by `+`, and `options` has those of each by its name.
    """
    if "+" in name:
        sites = {str(own["sites"]) for own in options.values() if "sites" in own}
        if len(sites) > 1:
            raise ValueError(f"methods: {name} has the sites {', '.join(sorted(sites))}; --attn-sites holds for all")
        flags = [word for one in name.split("+") for word in fairseq_flags(one, options.get(one, {}))[2:]]
        return ["--attn-reg", name, *flags]
    defaults = {option.name: option.default for option in options_of(REGISTRY[name])}
    flags = ["--attn-reg", name]
    for option, value in options.items():
        flag = _flag(name, option)
        if defaults[option] is False:  # a switch
            flags += [flag] if value else []
        else:
            flags += [flag, str(value).lower() if isinstance(value, bool) else str(value)]
    return flags


def _flag(method: str, option: str) -> str:
    shared = {one.name for one in options_of(Regularizer)}
    return f"--{'attn' if option in shared else method}-{option}".replace("_", "-")


def split_flags(flag: str, text: str) -> list[str]:
    """The words of a text of flags, as a shell parts them.

    Raises:
        ValueError: a quote in it is not closed, or nothing follows a backslash; the sentence names `flag`.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        reason = {"No closing quotation": "a quote is not closed", "No escaped character": "it ends in a backslash"}
        raise ValueError(f"{flag} {text!r}: {reason.get(str(error), str(error))}") from None


def select_methods(
    wanted: Any, overrides: Sequence[str] = (), table: Mapping[str, Method] | None = None
) -> list[Method]:
    """The methods asked for, in that order.

    Args:
        wanted: names, with commas or as a list, several that act together joined by `+`; or a mapping of each name to
            its settings, see `_configured`.
        overrides: texts `NAME=FLAGS`; the flags are put after the method's own, so that they win.
        table: the methods there are, by default all.

    Raises:
        ValueError: an unknown or repeated method, settings that it hasn't, an override of a method not selected, or an
            open quote.
    """
    table = known_methods() if table is None else table
    if isinstance(wanted, str):
        wanted = [name.strip() for name in wanted.split(",") if name.strip()]
    if not isinstance(wanted, Mapping):
        names = [str(name) for name in wanted or ()]
        if len(set(names)) != len(names):
            raise ValueError(f"--methods names a method twice: {','.join(names)}")
        wanted = dict.fromkeys(names)
    if not wanted:
        raise ValueError(f"--methods is empty; the methods are: {', '.join(table)}")
    chosen = {str(name): _configured(str(name), settings, table) for name, settings in wanted.items()}
    own = {name for name, settings in wanted.items() if _options_given(settings)}
    for override in overrides:
        name, separator, flags = override.partition("=")
        if not separator:
            raise ValueError(f"--method-flags wants NAME=FLAGS, given {override!r}")
        if name not in chosen:
            raise ValueError(f"--method-flags names {name!r}, which is not among --methods {','.join(chosen)}")
        words = split_flags("--method-flags", flags)
        if name not in own:
            _refuse_earlier_meaning(f"--method-flags {override}", name, words, table)
        chosen[name] = _with_flags(chosen[name], words)
    return list(chosen.values())


def _options_given(settings: Any) -> bool:
    """Whether the settings of a method in a configuration have any of its options."""
    return isinstance(settings, Mapping) and bool(set(settings) - set(_ANY_METHOD))


def _refuse_earlier_meaning(where: str, name: str, words: Sequence[str], table: Mapping[str, Method]) -> None:
    """Refuse `attention_dropout` with nothing but the flag of the model's own: it was the name of that row.

    Raises:
        ValueError: it is so; the sentence has the row's present name.
    """
    now = next((row.name for row in table.values() if name in row.earlier and row.regularizer is None), None)
    if now and name in table and OWN_DROPOUT in [word.partition("=")[0] for word in words]:
        raise ValueError(
            f"{where}: {name} is the method of that name, which adds to the model's own attention dropout; the row "
            f"that sets it by {OWN_DROPOUT} is called {now} now (or give {name} its p as well)"
        )


def _configured(name: str, settings: Any, table: Mapping[str, Method]) -> Method:
    """A method of the table with settings of its own.

    Args:
        settings: a mapping of `like` (the method it is like, by default that of its name), `title`, `flags` (more flags
            of fairseq-train, in one text) and any option of the method; or None.
    """
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        raise ValueError(f"methods: {name} is {settings!r}, but must be a mapping of settings, such as {{p: 0.3}}")
    like = str(settings.get("like", name))
    base = find_method(like, table)
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(f"methods: {name!r} isn't a name for a folder; use letters, digits, '_', '-', '+' and '.'")
    own = {str(key): value for key, value in settings.items() if key not in _ANY_METHOD}
    options = _options(name, base, own)
    flags = fairseq_flags(base.regularizer, options) if base.regularizer else base.flags
    more = split_flags(f"methods: {name}: flags", str(settings.get("flags") or ""))
    if not own:
        _refuse_earlier_meaning(f"methods: {name}", like, more, table)
    title = str(settings.get("title", base.title if like == name else name))
    earlier, replaced = base.earlier if name == base.name else (), _replaced(base, own)
    together = tuple(setting for setting in base.together if setting not in replaced)
    asked = frozenset(_flag(*base.settings[key]) for key in own)
    return _with_flags(Method(name, title, tuple(flags), base.regularizer, options, earlier, together, asked), more)


def _with_flags(method: Method, words: Sequence[str]) -> Method:
    """A method with more flags, which win; what they replace of its preset goes."""
    names = {word.partition("=")[0] for word in words}
    method = dataclasses.replace(method, asked=method.asked | names)
    replaced = _replaced(method, [name for name in method.together if _flag(*method.settings[name]) in names])
    if not replaced:
        return dataclasses.replace(method, flags=(*method.flags, *words))
    added = method.flags[len(fairseq_flags(method.regularizer, method.options)) :]
    options = _options_without(method, replaced)
    chosen = options if "+" in method.regularizer else options[method.regularizer]
    flags = (*fairseq_flags(method.regularizer, chosen), *added, *words)
    together = tuple(name for name in method.together if name not in replaced)
    return dataclasses.replace(method, flags=flags, options=chosen, together=together)


def _replaced(method: Method, given: Iterable[str]) -> list[str]:
    """The settings of the presets behind a method that others take the place of: all that mean something together."""
    changed = {method.settings[name][0] for name in set(method.together) & set(given)}
    return [name for name in method.together if method.settings[name][0] in changed]


def _options_without(method: Method, settings: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The options of each regularizer of a method, but for some settings."""
    names, left = (method.regularizer or "").split("+"), {method.settings[name] for name in settings}
    options = method.options if len(names) > 1 else {names[0]: method.options}
    return {one: {key: value for key, value in options.get(one, {}).items() if (one, key) not in left} for one in names}


def find_method(name: str, table: Mapping[str, Method]) -> Method:
    """A method of the table, or several that act together, joined by `+`.

    Raises:
        ValueError: an unknown one; or some that cannot act together.
    """
    parts = []
    earlier = {before: method for method in table.values() for before in method.earlier}
    for one in name.split("+"):
        if one not in table and one not in earlier:
            raise ValueError(f"unknown method {one!r}; the methods are: {', '.join(table)}")
        parts.append(table[one] if one in table else earlier[one])
    if len(parts) == 1:
        return parts[0]
    bare = next((part.name for part in parts if part.regularizer is None), None)
    if bare:
        raise ValueError(f"{name}: {bare} is no regularizer, so it combines with none; give its flags as `flags`")
    joined = "+".join(str(part.regularizer) for part in parts)
    options = {str(part.regularizer): part.options for part in parts}
    try:
        build(joined, **options)
    except ValueError as error:
        raise ValueError(f"methods: {error}") from None
    title, flags = " + ".join(part.title for part in parts), tuple(fairseq_flags(joined, options))
    together = tuple(f"{part.regularizer}_{option}" for part in parts for option in part.together)
    return Method(name, title, flags, joined, options, together=together)


def _options(name: str, base: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a method with settings of its own: a number may come as text, and YAML reads a bare `off` as
    False. Of several methods, a setting is `METHOD_OPTION`, or `sites` for those that have sites.
    """
    several = base.regularizer is not None and "+" in base.regularizer
    methods = base.regularizer.split("+") if base.regularizer else []
    known = base.settings
    options = _options_without(base, _replaced(base, given)) if methods else {}
    for key, value in given.items():
        if key not in known:
            allowed = ", ".join([*_ANY_METHOD, *known])
            raise ValueError(f"methods: {name}: unknown setting {key!r}; the settings are: {allowed}")
        method, option = known[key]
        holders = [one for one in methods if REGISTRY[one].needs_sites] if key == "sites" and several else [method]
        for holder in holders:
            options[holder][option] = _read(typing.get_type_hints(REGISTRY[holder])[option], value)
    if not methods:
        return {}
    chosen = options if several else options[methods[0]]
    try:
        build(base.regularizer, **chosen)
    except (TypeError, ValueError) as error:
        raise ValueError(f"methods: {name}: {error}") from None
    return chosen


def _read(hint: Any, value: Any) -> Any:
    """An option's value as the method takes it."""
    if hint is str:
        return "off" if value is False else str(value)
    if hint in (int, float) and isinstance(value, str):
        with contextlib.suppress(ValueError):  # the method says what is wrong with it
            return hint(value)
    return value
