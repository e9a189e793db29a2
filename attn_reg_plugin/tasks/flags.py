"""The methods' options as flags of a fairseq task, and the regularizer that they ask for."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Iterator
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from omegaconf import II

from attn_reg_plugin.regularizers import REGISTRY, Combination, Regularizer, build, options_of

#: what a task needs to see of the rest of fairseq's configuration; these fields aren't flags (text:
#: fairseq's parser takes an interpolated bool for True)
SEEN = (
    ("save_dir", "checkpoint.save_dir"),
    ("restore_file", "checkpoint.restore_file"),
    ("clip_norm", "optimization.clip_norm"),
    ("cpu", "common.cpu"),
    ("tpu", "common.tpu"),
    ("fp16", "common.fp16"),
    ("memory_efficient_fp16", "common.memory_efficient_fp16"),
    ("fp16_no_flatten_grads", "common.fp16_no_flatten_grads"),
    ("load_checkpoint_on_all_dp_ranks", "checkpoint.load_checkpoint_on_all_dp_ranks"),
    ("max_update", "optimization.max_update"),
    ("max_epoch", "optimization.max_epoch"),
    ("update_freq", "optimization.update_freq"),
    ("skip_remainder_batch", "optimization.skip_remainder_batch"),
    ("train_subset", "dataset.train_subset"),
    ("ddp_backend", "distributed_training.ddp_backend"),
)
#: those of them that are lists, which a text cannot take
_LISTS = ("update_freq",)


def seen(config: Any, name: str) -> Any:
    """A part of fairseq's configuration, see `SEEN`; a task without a config dataclass has all of it itself."""
    value = getattr(config, f"attn_{name}", None)
    return getattr(config, name, None) if value is None or str(value).startswith("${") else value


def _flag(method: str, option: dataclasses.Field, hints: dict[str, Any]) -> tuple[str, Any, dataclasses.Field]:
    """One option as a field of a fairseq config: `p` of `ad_drop` is `ad_drop_p`, the flag `--ad-drop-p`.

    A switch that is on by default becomes `true|false` text: fairseq would turn it into a flag that means its
    opposite.
    """
    kind, default, text = hints[option.name], option.default, option.metadata["help"]
    choices = option.metadata["choices"]
    if kind is bool and default:
        kind, default, choices = str, "true", ("true", "false")
    if choices:
        text += f"; one of {', '.join(choices)}"
    return (
        f"{method}_{option.name}",
        kind,
        dataclasses.field(default=default, metadata={"help": f"{method}: {text}"}),
    )


def _flags() -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """The fields of every registered method, the shared ones once."""
    methods = ", ".join(["none", *sorted(REGISTRY)])
    yield (
        "attn_reg",
        str,
        dataclasses.field(
            default="none", metadata={"help": f"attention regularizer; one of {methods}; or several, joined by +"}
        ),
    )
    shared = {option.name: option for option in options_of(Regularizer)}
    for option in shared.values():
        yield f"attn_{option.name}", str, dataclasses.field(default=option.default, metadata=option.metadata)
    for name, source in SEEN:
        yield f"attn_{name}", Any if name in _LISTS else str, dataclasses.field(default=II(source))
    for name, method in REGISTRY.items():
        hints = typing.get_type_hints(method)
        for option in options_of(method):
            if option.name not in shared:
                yield _flag(name, option, hints)


def flag_of(method: str, option: str) -> str:
    """The flag of one option; those that all methods share are named after none: `--attn-sites`."""
    shared = option in {entry.name for entry in options_of(Regularizer)}
    return f"--{'attn' if shared else method}-{option}".replace("_", "-")


def with_attn_reg(config: type[FairseqDataclass]) -> type[FairseqDataclass]:
    """A task's config with the regularizers' flags added; give it to `register_task`.

    Args:
        config: the config dataclass of a fairseq task.
    """
    return dataclasses.make_dataclass(f"AttnReg{config.__name__}", list(_flags()), bases=(config,))


def regularizer_from(config: Any) -> Regularizer | None:
    """The regularizer that a fairseq config or namespace asks for; None for `none`.

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
    """One method from its flags.

    Args:
        given: the whole value of --attn-reg.
    """
    if name not in REGISTRY:
        joined = "; several are joined by +" if "+" in given else ""
        known = ", ".join(["none", *sorted(REGISTRY)])
        raise ValueError(f"--attn-reg is {given!r}, but must be one of {known}{joined}")
    method = REGISTRY[name]
    hints, values = typing.get_type_hints(method), {}
    for option in options_of(method):
        shared = option.name in {entry.name for entry in options_of(Regularizer)}
        value = getattr(config, f"attn_{option.name}" if shared else f"{name}_{option.name}", option.default)
        if hints[option.name] is bool and isinstance(value, str):
            if value.lower() not in ("true", "false"):
                raise ValueError(f"{flag_of(name, option.name)} is {value!r}, but must be true or false")
            value = value.lower() == "true"
        elif hints[option.name] is str and value in (False, "False"):
            value = "off"  # YAML reads a bare `off` as False
        values[option.name] = value
    try:
        return build(name, **values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--attn-reg {name}: {error}") from None


def print_flags(task: str, config: type[FairseqDataclass]) -> None:
    """Print the flags of a task: fairseq's own --help leaves out those of every task."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    gen_parser_from_dataclass(parser.add_argument_group(f"--task {task}"), config(), delete_default=False)
    print(parser.format_help())


def print_flags_if_asked(task: str, config: type[FairseqDataclass]) -> None:
    """Print them if the command line asks for help on this task."""
    if {"-h", "--help"} & set(sys.argv[1:]) and task in " ".join(sys.argv):
        print_flags(task, config)
