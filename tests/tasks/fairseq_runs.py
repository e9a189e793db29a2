"""Real fairseq commands on a tiny made-up corpus.

Each command is the entry point that the console script calls, in a process of its own: forked from a server that has
fairseq imported (which takes seconds) but nothing of the plugin, so that a command finds the plugin as a user's does,
by `--user-dir`.
"""

import atexit
import importlib.util
import json
import multiprocessing
import os
import random
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from tests.processes import PATIENCE, free_port, start

#: found but not imported: fairseq does not look for tasks in a user dir whose module is imported already
PLUGIN = str(Path(importlib.util.find_spec("attn_reg_plugin").origin).parent)
SIZES = {"train": 160, "valid": 20, "test": 12}
MODEL = shlex.split(
    "--arch transformer --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16 --decoder-embed-dim 16 "
    "--encoder-ffn-embed-dim 32 --decoder-ffn-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2 "
    "--share-all-embeddings --dropout 0.1 --attention-dropout 0.1"
)
TRAINING = shlex.split(
    "--optimizer adam --lr 0.01 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 200 "
    "--cpu --seed 1 --num-workers 0 --log-format json --log-interval 1 --no-epoch-checkpoints --disable-validation "
    "--required-batch-size-multiple 1"
)
AD_DROP = shlex.split("--attn-reg ad_drop --ad-drop-p 0.4 --ad-drop-q 0.5 --ad-drop-cross-tuning off")

#: of the shared trainings; an epoch of the corpus is 6 updates
UPDATES = ["--max-update", "8"]


@dataclass
class Finished:
    """A command that ended: its exit status (negative: the signal that ended it), all that it printed, and where."""

    status: int
    output: str
    log: Path

    def lines(self, tag: str = "train_inner") -> list[dict[str, Any]]:
        """The JSON log lines of `tag`, `train_inner` (one per update) or `train` (one per epoch), hydra's form too."""
        form = rf"(?:\| {tag} \||\[{tag}\]\[INFO\] -) (\{{.*\}})$"
        return [json.loads(line) for line in re.findall(form, self.output, re.MULTILINE)]

    def losses(self) -> list[str]:
        return [line["loss"] for line in self.lines()]

    @property
    def checkpoint(self) -> Path:
        """The last one of a training, whose log is beside it."""
        return self.log.with_name("checkpoint_last.pt")

    def check(self) -> Self:
        """Itself, if it succeeded."""
        assert self.status == 0, self.output[-3000:]
        return self


class Job:
    """A command under way."""

    def __init__(self, tool: str, argv: Sequence[str], log: Path, prepare: Callable[[], None] | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.process = start(_run, tool, list(argv), str(log), prepare)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition; False if the command ended first."""
        start = time.monotonic()
        while not condition():
            if not self.process.is_alive():
                return condition()
            assert time.monotonic() - start < PATIENCE, self.output()[-3000:]
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        """End it at once, as a machine that loses power does."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE)

    def wait(self) -> Finished:
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.kill()
            raise AssertionError(f"still running after {PATIENCE} s: {self.output()[-3000:]}")
        return Finished(self.process.exitcode, self.output(), self.log)


def _run(tool: str, argv: list[str], log: str, prepare: Callable[[], None] | None) -> None:
    """In the new process: what the console script `fairseq-TOOL` does."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # what `prepare` came with may have imported the plugin, and fairseq passes over a user dir that is there already
    for name in [name for name in sys.modules if name.partition(".")[0] == "attn_reg_plugin"]:
        del sys.modules[name]
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a process of its own
    sys.argv = [f"fairseq-{tool}", *argv]
    if prepare is not None:
        prepare()
    try:
        importlib.import_module(f"fairseq_cli.{tool}").cli_main()
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out; TensorBoard's last numbers are written there


def run(tool: str, argv: Sequence[str], log: Path) -> Finished:
    return Job(tool, argv, log).wait()


def train_arguments(
    data: Path | None,
    save: Path,
    *flags: str,
    task: str = "attn_reg_translation",
    model: Sequence[str] = MODEL,
    without: Sequence[str] = (),
    user_dir: str | Path | None = PLUGIN,
) -> list[str]:
    """The arguments of a tiny training.

    Args:
        data: None for a task that makes up its own.
        flags: come last and so win.
        model: flags of the architecture.
        without: flags of `model` and of TRAINING to leave out, with their values.
        user_dir: None for stock fairseq.
    """
    chosen: list[str] = []
    leave_out = False
    for flag in [*model, *TRAINING]:
        leave_out = flag in without if flag.startswith("--") else leave_out
        chosen += [] if leave_out else [flag]
    plugin = [] if user_dir is None else ["--user-dir", str(user_dir)]
    return [*([] if data is None else [str(data)]), *plugin, "--task", task, *chosen, "--save-dir", str(save), *flags]


def train(data: Path | None, save: Path, *flags: str, **options: Any) -> Finished:
    return run("train", train_arguments(data, save, *flags, **options), save / "train.log")


#: of each of two data-parallel processes
GLOO = shlex.split("--distributed-world-size 2 --distributed-backend gloo --distributed-no-spawn --device-id 0")
GLOO += ["--ddp-backend", "legacy_ddp"]


def start_ranks(
    arguments: Sequence[str],
    logs: Path,
    ranks: int = 2,
    prepare: Callable[[int], None] | None = None,
    backend: str = "legacy_ddp",
) -> list[Job]:
    """Start a training in one process or two, whose logs are `logs` with the rank.

    Args:
        arguments: of `train_arguments`; those of GLOO come last and so win.
        prepare: called with the rank in the training's process before the command.
        backend: of data parallel training.
    """
    several = [*GLOO, "--ddp-backend", backend] if ranks > 1 else []
    several += ["--distributed-init-method", f"tcp://127.0.0.1:{free_port()}"] if several else []
    jobs = []
    for rank in range(ranks):
        place = ["--distributed-rank", str(rank)] if several else []
        log = logs.with_name(f"{logs.name}{rank}.log")
        ready = None if prepare is None else partial(prepare, rank)
        jobs.append(Job("train", [*arguments, *several, *place], log, ready))
    return jobs


def finish_ranks(jobs: Sequence[Job]) -> Finished:
    """Wait for all of them to end well; the first one's end."""
    first, *_ = [job.wait().check() for job in jobs]
    return first


def generate(data: Path, checkpoint: Path, *flags: str, task: str = "translation") -> Finished:
    log = checkpoint.with_suffix(".generate.log")
    arguments = [str(data), "--user-dir", PLUGIN, "--task", task, "--path", str(checkpoint), "--beam", "2", "--cpu"]
    return run(
        "generate",
        [*arguments, "--max-len-b", "12", "--num-workers", "0", "--required-batch-size-multiple", "1", *flags],
        log,
    )


def hypotheses(generated: Finished) -> list[str]:
    """The translations with their scores, as printed."""
    return re.findall(r"^H-\d+\t.*$", generated.check().output, re.MULTILINE)


def make_corpus(root: Path, words: int = 24, sizes: dict[str, int] = SIZES, mark: str = "") -> Path:
    """A binarized parallel corpus en-ro with alignments: each target is its source reversed, word for word.

    Args:
        mark: stands before each word, as sentencepiece marks a beginning.
    """
    generator = random.Random(0)
    raw = root / "raw"
    raw.mkdir(parents=True)
    for split, size in sizes.items():
        rows = [[generator.randrange(words) for _ in range(generator.randint(2, 8))] for _ in range(size)]
        lines = {
            "en": [" ".join(f"{mark}e{word}" for word in row) for row in rows],
            "ro": [" ".join(f"{mark}r{word}" for word in reversed(row)) for row in rows],
            "align": [" ".join(f"{i}-{len(row) - 1 - i}" for i in range(len(row))) for row in rows],
        }
        for suffix, text in lines.items():
            (raw / f"{split}.{suffix}").write_text("\n".join(text) + "\n", encoding="utf-8")
    prefixes = [part for split in sizes for part in (f"--{split}pref", str(raw / split))]
    arguments = ["--source-lang", "en", "--target-lang", "ro", *prefixes, "--joined-dictionary", "--workers", "1"]
    arguments += ["--align-suffix", "align", "--destdir", str(root / "bin")]
    run("preprocess", arguments, root / "preprocess.log").check()
    return root / "bin"


#: of fairseq-hydra-train, beside the example's YAML
TINY = shlex.split(
    "common.cpu=true common.log_format=json common.log_interval=1 optimization.max_update=2 dataset.num_workers=0 "
    "model.encoder.layers=2 model.decoder.layers=2 model.encoder.embed_dim=16 model.decoder.embed_dim=16 "
    "model.encoder.ffn_embed_dim=32 model.decoder.ffn_embed_dim=32"
)


def hydra(corpus: Path, folder: Path, *overrides: str) -> list[str]:
    """Arguments of fairseq-hydra-train for the example's YAML, at a tiny size."""
    examples = Path(PLUGIN).parent / "examples" / "hydra"
    given = ["--config-dir", str(examples), "--config-name", "ad_drop", f"hydra.run.dir={folder}", *TINY]
    return [*given, f"common.user_dir={PLUGIN}", f"task.data={corpus}", *overrides]


def hide_transformers() -> None:
    """In the new process, before fairseq's command: as if transformers and its tokenizers were not installed."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("transformers", "tokenizers")]:
        del sys.modules[name]  # of the server that the process was forked from
    sys.modules.update(transformers=None, tokenizers=None)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint, read as safely as the plugin promises it can be."""
    import attn_reg_plugin  # noqa: F401  it allows the types that fairseq writes

    return torch.load(path, map_location="cpu", weights_only=True)


def trained_state(path: Path) -> dict[str, Any]:
    """Read what training made: weights, optimizer state and the number of updates."""
    checkpoint = read_checkpoint(path)
    return {
        "model": checkpoint["model"],
        "optimizer": checkpoint["last_optimizer_state"],
        "updates": checkpoint["optimizer_history"][-1]["num_updates"],
    }


def plain_and_defender(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The weights of a plain training and of a game's defender after four updates; fairseq writes fp32."""
    plain = read_checkpoint(folder / "plain" / "checkpoint_last.pt")["model"]
    defender = torch.load(folder / "game" / "attn_reg_state_4.pt", weights_only=True)["defender"]["model"]
    return [{name: value.float() for name, value in model.items()} for model in (plain, defender)]
