"""A command of fairseq's, tried without training: its flags, files, model and method.

fairseq's own parsers read it, its task is set up, and the model is built without weights and without memory (on
torch's meta device).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks, utils
from fairseq.models import import_models

from attn_reg_plugin.checkpoints import WEIGHTS
from attn_reg_plugin.experiments.running.run import USER_DIR
from attn_reg_plugin.tasks.fairseq_settings import FAIRSEQ_SETTINGS, total_updates


def parse_command(command: Sequence[str], kind: str) -> argparse.Namespace:
    """Read a command `python -m fairseq_cli.NAME ...` by fairseq's parser of this kind, `training` or `generation`."""
    words = list(command[3:])
    place = words.index("--user-dir")
    assert words[place + 1] == str(USER_DIR)
    del words[place : place + 2]  # it is imported here, as the package that it is
    tasks.import_tasks(str(USER_DIR / "tasks"), f"{USER_DIR.name}.tasks")
    import_models(str(USER_DIR / "models"), f"{USER_DIR.name}.models")
    user = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    user.add_argument("--user-dir")
    utils.import_user_module(user.parse_known_args(words)[0])
    return options.parse_args_and_arch(getattr(options, f"get_{kind}_parser")(), words)


def try_training(command: Sequence[str]) -> None:
    """Set up the task and build the model of a command of fairseq-train.

    Raises:
        ValueError: what the training would refuse in its first seconds.
        SystemExit: a flag that fairseq's parser refuses.
    """
    _built(parse_command(command, "training"))


def count_updates(command: Sequence[str]) -> int:
    """Count the updates of a command of fairseq-train in one process; its training set is divided into batches.

    Raises:
        ValueError, SystemExit: as `try_training`, or there is no --max-epoch.
    """
    args = parse_command(command, "training")
    if not args.max_epoch:
        raise ValueError("the updates of a training without --max-epoch cannot be counted")
    task, model = _built(args)
    task.load_dataset(args.train_subset)
    lengths = [task.max_positions()] if model is None else [task.max_positions(), model.max_positions()]
    batches = task.get_batch_iterator(
        task.dataset(args.train_subset),
        max_tokens=args.max_tokens,
        max_sentences=args.batch_size,
        max_positions=utils.resolve_max_positions(*lengths, args.max_tokens),
        ignore_invalid_inputs=True,
        required_batch_size_multiple=args.required_batch_size_multiple,
        seed=args.seed,
        epoch=1,
    )
    updates = total_updates(args, len(batches))
    assert updates is not None
    return updates


def _built(args: argparse.Namespace) -> tuple[Any, torch.nn.Module | None]:
    """Build the task of a training, and its model without memory, if that can be."""
    for name, _ in FAIRSEQ_SETTINGS:  # which fairseq fills in later; without a --save-dir nothing is looked for there
        setattr(args, f"attn_{name}", None if name == "save_dir" else getattr(args, name, None))
    start = args.finetune_from_model  # which fairseq opens late
    if start and not Path(start).is_file():
        raise ValueError(f"--finetune-from-model is {start}, but there is no such file")
    task = tasks.setup_task(args)
    given = getattr(args, "hf_model", None)
    if given and Path(given).is_dir() and not getattr(args, "hf_from_config", False):
        if not any(path for pattern in WEIGHTS for path in Path(given).glob(pattern)):
            raise ValueError(f"--hf-model {given} has no weights ({' or '.join(WEIGHTS)})")
        args.hf_from_config = True
    try:
        with torch.device("meta"):
            return task, task.build_model(args)
    except (ValueError, OSError):
        raise
    except Exception:  # a model that cannot be built without memory: the training says what is wrong, if anything is
        return task, None
    finally:
        if getattr(task, "regularizer", None) is not None:
            task.regularizer.detach()
