"""The console script `attn-reg`; help needs no torch."""

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from attn_reg_plugin.files import explain

#: heading -> subcommand -> help; all but `run` and `user-dir` are steps of a file, see `commands.py`
COMMANDS: dict[str, dict[str, str]] = {
    "data": {
        "prepare text": "your own parallel files, of any two languages, for fairseq",
        "prepare wmt16": "WMT16 news translation, from the hub or a folder of parallel files",
        "prepare phrasebook": "a small made-up corpus in English, Romanian and Turkish, for trying things",
        "convert opus-mt": "OPUS-MT (Marian) models into fairseq, and back",
    },
    "experiments": {
        "compare": "train, translate and score several methods; one table",
        "finetune": "fine-tune an encoder on labelled text with several methods; one table",
        "sweep": "search the settings of a method, beside as many plain trainings",
        "run": "all steps of a configuration file: prepare, compare, finetune ...",
        "report": "runs as an HTML page",
    },
    "other": {
        "export": "a trained encoder as a folder for from_pretrained",
        "bench": "time and memory of a training step, method by method",
        "user-dir": "print the folder to give to fairseq's --user-dir",
    },
}
#: those that take flags of fairseq-train behind `--`
_WITH_REST = ("compare", "finetune", "run")
#: what a command may lack -> the extra of setup.py that brings it
EXTRAS = {"fairseq": "fairseq", "seqeval": "fairseq", "sklearn": "fairseq", "transformers": "hf", "accelerate": "hf"}
EXTRAS |= dict.fromkeys(
    ["numpy", "pandas", "sacrebleu", "sentencepiece", "datasets", "rich", "matplotlib", "omegaconf", "optuna", "scipy"],
    "experiments",
)


class Parser(argparse.ArgumentParser):
    """Names the nearest flag where one is mistyped."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and stop."""
        unknown = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
        flags = [flag for action in self._actions for flag in action.option_strings]
        super().error(message + _nearest(unknown, flags) if message.startswith("unrecognized") else message)


def _nearest(name: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {found[0]}?" if found else ""


def user_dir() -> Path:
    """The folder to give to fairseq's `--user-dir`."""
    return Path(__file__).resolve().parent


def overview() -> str:
    """The help of `attn-reg` itself."""
    lines = ["usage: attn-reg COMMAND ...", "", "Attention regularizers for Transformers."]
    for title, commands in COMMANDS.items():
        lines += ["", f"{title}:", *(f"  {name:20}{text}" for name, text in commands.items())]
    return "\n".join([*lines, "", "`attn-reg COMMAND --help` lists the options of a command and has two examples."])


def build_parser(command: str) -> Parser:
    """The parser of a subcommand, whose settings are imported."""
    text = next(commands[command] for commands in COMMANDS.values() if command in commands)
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"attn-reg {command}", description=text, formatter_class=layout, allow_abbrev=False)
    if command != "user-dir":
        from attn_reg_plugin.commands import add_arguments, examples_of

        add_arguments(command, parser)
        parser.epilog = "\n".join(["examples:", *(f"  {one}" for one in examples_of(command))])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `attn-reg`; bad input ends in one sentence and exit status 2, without a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not logging.root.handlers and logging.lastResort is not None:
        # one of fairseq's models asks for everybody's debug messages at its import, unless logging is set up
        logging.root.addHandler(logging.lastResort)
    names = [name for commands in COMMANDS.values() for name in commands]
    if " ".join(argv[:2]) in names:
        argv[:2] = [" ".join(argv[:2])]
    asks = not argv or argv[0] in ("-h", "--help")
    if not asks and argv[0] not in names:
        print(f"attn-reg: unknown command {argv[0]!r}{_nearest(argv[0], names)}\n\n{overview()}", file=sys.stderr)
        return 2
    command, arguments = "" if asks else argv[0], None
    try:
        if asks:
            print(overview(), flush=True)
            return 0 if argv else 2
        arguments = _parsed(command, argv[1:])
        if command == "user-dir":
            print(user_dir())
            return 0
        # which the package leaves out on the command line, for its help
        from attn_reg_plugin import backends, commands  # noqa: F401
        from attn_reg_plugin.checkpoints import allow_checkpoint_types

        allow_checkpoint_types()
        return commands.run(arguments)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:  # a part of a package, or another's
            raise
        extra = f"'.[{EXTRAS[error.name]}]'"
        said = f"{error.name} is not installed; in the checkout of this package, pip install {extra} brings it"
    except KeyboardInterrupt:
        print(f"attn-reg {command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read standard output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        said = explain(error, getattr(arguments, "out", None))
    except ValueError as error:
        said = str(error)
    print(f"attn-reg {command}: {said}", file=sys.stderr)
    return 2


def _parsed(command: str, words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command; `rest` are those behind `--`."""
    parser = build_parser(command)
    place = list(words).index("--") if "--" in words else len(words)
    parse = parser.parse_args if command == "run" else parser.parse_intermixed_args
    arguments = parse(list(words[:place]), argparse.Namespace(command=command))
    arguments.rest = list(words[place + 1 :])
    if arguments.rest and command not in _WITH_REST:
        parser.error(f"{command} takes nothing behind --")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
