"""The commands of a comparison, tried before anything is written: their flags, files, model and method.

fairseq's own parsers read the commands, its task is set up, and the model is built without weights and without memory
(on torch's meta device), so that what a training would refuse in its first seconds is said at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from attn_reg_plugin.experiments.runs import USER_DIR, Run

#: flags that name a file, which fairseq opens late
_FILES = ("finetune_from_model", "load_checkpoint_heads", "srcdict", "tgtdict")
#: how the files of weights are called that transformers reads from a folder
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def check_runs(runs: Iterable[Run]) -> None:
    """Try what is not done yet of some runs, once where they differ in the seed only.

    Raises:
        ValueError: a command cannot work; one sentence that says of which method, and why.
    """
    tried = set()
    for one in runs:
        key = (one.method.name, one.train_flags)
        if key in tried or one.finished():
            continue
        tried.add(key)
        if "training" not in one.result():
            _tried(lambda one=one: _training(one.train_command()), one.method.title)
        for subset in one.subsets[:1]:
            _tried(lambda one=one, subset=subset: _parse(one.generate_command(subset), "generation"), one.method.title)


def _tried(function: Callable[[], Any], title: str) -> None:
    """Call a function in silence; what it refuses becomes a ValueError that names the method."""
    said = io.StringIO()
    try:
        with _silence(said):
            function()
    except SystemExit:  # argparse has no other way to refuse
        reason = (said.getvalue().strip().splitlines() or ["it asks for help, not for a training"])[-1]
        raise ValueError(f"{title}: {reason.partition('error: ')[2] or reason}") from None
    except (ValueError, OSError, AssertionError) as error:
        raise ValueError(f"{title}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}") from error


@contextlib.contextmanager
def _silence(said: io.StringIO) -> Iterator[None]:
    """Nothing is printed, warned of or logged."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _parse(command: Sequence[str], kind: str) -> argparse.Namespace:
    """A command of fairseq's as its own parser reads it.

    Args:
        command: `python -m fairseq_cli.NAME ...`.
        kind: `training` or `generation`.
    """
    from fairseq import options, utils
    from fairseq.models import import_models
    from fairseq.tasks import import_tasks

    import_tasks(str(USER_DIR / "tasks"), f"{USER_DIR.name}.tasks")
    import_models(str(USER_DIR / "models"), f"{USER_DIR.name}.models")
    words = list(command[3:])
    place = words.index("--user-dir")
    assert words[place + 1] == str(USER_DIR)
    del words[place : place + 2]  # it is imported already, under its own name
    user = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    user.add_argument("--user-dir")
    utils.import_user_module(user.parse_known_args(words)[0])
    return options.parse_args_and_arch(getattr(options, f"get_{kind}_parser")(), words)


def _training(command: Sequence[str]) -> None:
    from fairseq import tasks

    from attn_reg_plugin.tasks.attn_reg_task import SEEN

    args = _parse(command, "training")
    for name, seen in SEEN:  # which fairseq fills in later; without a --save-dir nothing is looked for or written there
        setattr(args, f"attn_{name}", None if name == "save_dir" else getattr(args, seen.rpartition(".")[2], None))
    for name in _FILES:
        path = getattr(args, name, None)
        if path and not Path(path).is_file():
            raise ValueError(f"--{name.replace('_', '-')} is {path}, but there is no such file")
    task = tasks.setup_task(args)
    folder = Path(getattr(args, "hf_model", None) or "")
    if getattr(args, "hf_model", None) and folder.is_dir() and not getattr(args, "hf_from_config", False):
        if not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
            raise ValueError(f"--hf-model {folder} has no weights ({' or '.join(_WEIGHTS)})")
        args.hf_from_config = True
    try:
        with torch.device("meta"):
            task.build_model(args)
    except (ValueError, OSError):
        raise
    except (
        Exception
    ):  # a model that cannot be built without memory; the training will say what is wrong with it, if it is
        return
    finally:
        if getattr(task, "regularizer", None) is not None:
            task.regularizer.detach()
