"""The methods' options as flags of a fairseq task, and the regularizer that they ask for."""

import argparse
import dataclasses
import sys
import typing
from collections.abc import Iterator
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from omegaconf import II

from attn_reg_plugin.regularizers import REGISTRY, Combination, Regularizer, build, option_flag, options_of
from attn_reg_plugin.tasks.fairseq_settings import FAIRSEQ_SETTINGS, LISTS

#: the field of the flag --attn-rates-by-site
RATES_BY_SITE = "attn_rates_by_site"


def with_attn_reg(config: type[FairseqDataclass]) -> type[FairseqDataclass]:
    """Add the regularizers' flags to the config dataclass of a fairseq task; give the result to `register_task`."""
    return dataclasses.make_dataclass(f"AttnReg{config.__name__}", list(_fields()), bases=(config,))


def _fields() -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Fields of every registered method, the shared ones once, and of what a task sees of fairseq's configuration."""
    text = f"attention regularizer; one of {_methods()}; or several, joined by +"
    yield "attn_reg", str, dataclasses.field(default="none", metadata={"help": text})
    text = "log the drop rate of each attention as well, not only their mean"
    yield RATES_BY_SITE, bool, dataclasses.field(default=False, metadata={"help": text})
    shared = {option.name for option in options_of(Regularizer)}
    for option in options_of(Regularizer):
        yield f"attn_{option.name}", str, dataclasses.field(default=option.default, metadata=option.metadata)
    for name, source in FAIRSEQ_SETTINGS:
        yield f"attn_{name}", Any if name in LISTS else str, dataclasses.field(default=II(source))
    for name, method in REGISTRY.items():
        hints = typing.get_type_hints(method)
        for option in options_of(method):
            if option.name not in shared:
                yield _field(name, option, hints[option.name])


def _field(method: str, option: dataclasses.Field, kind: Any) -> tuple[str, Any, dataclasses.Field]:
    """One option as a field of a fairseq config: `p` of `ad_drop` is `ad_drop_p`, the flag `--ad-drop-p`.

    A switch that is on by default becomes `true|false` text: fairseq would turn it into a flag that means its
    opposite.
    """
    default, text, choices = option.default, option.metadata["help"], option.metadata.get("choices")
    if kind is bool and default:
        kind, default, choices = str, "true", ("true", "false")
    if choices:
        text += f"; one of {', '.join(choices)}"
    return f"{method}_{option.name}", kind, dataclasses.field(default=default, metadata={"help": f"{method}: {text}"})


def _methods() -> str:
    return ", ".join(["none", *sorted(REGISTRY)])


def regularizer_from(config: Any) -> Regularizer | None:
    """Build the regularizer that a fairseq config or namespace asks for; None for `none`.

    Raises:
        ValueError: an unknown method, or an option out of its range.
    """
    name = getattr(config, "attn_reg", "none")
    if name == "none":
        return None
    parts = [_built(config, part, name) for part in name.split("+")]
    if len(parts) == 1:
        return parts[0]
    try:
        return Combination(parts)
    except ValueError as error:
        raise ValueError(f"--attn-reg {error}") from None


def _built(config: Any, name: str, given: str) -> Regularizer:
    """Build a method from its flags; `given` is the whole value of --attn-reg."""
    if name not in REGISTRY:
        joined = "; several are joined by +" if "+" in given else ""
        raise ValueError(f"--attn-reg is {given!r}, but must be one of {_methods()}{joined}")
    hints, values = typing.get_type_hints(REGISTRY[name]), {}
    for option in options_of(REGISTRY[name]):
        flag = "--" + option_flag(name, option.name)
        value = getattr(config, flag.lstrip("-").replace("-", "_"), option.default)
        if hints[option.name] is bool and isinstance(value, str):
            if value.lower() not in ("true", "false"):
                raise ValueError(f"{flag} is {value!r}, but must be true or false")
            value = value.lower() == "true"
        elif hints[option.name] is str and value in (False, "False"):
            value = "off"  # YAML reads a bare `off` as False
        values[option.name] = value
    try:
        return build(name, **values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--attn-reg {name}: {error}") from None


def print_flags_if_asked(task: str, config: type[FairseqDataclass]) -> None:
    """Print the flags of a task if the command line asks for help on it: fairseq's --help leaves out every task's."""
    if {"-h", "--help"} & set(sys.argv[1:]) and task in " ".join(sys.argv):
        parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
        gen_parser_from_dataclass(parser.add_argument_group(f"--task {task}"), config(), delete_default=False)
        print(parser.format_help())
