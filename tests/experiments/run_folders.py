"""Folders as `attn-reg compare`, `attn-reg finetune` and Trainer leave them, without any training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SITES = ("encoder.self[0]", "encoder.self[1]", "decoder.cross[0]")


def _line(tag: str, record: Mapping[str, object]) -> str:
    """A line as fairseq logs it: numbers are text."""
    return f"2026-01-01 00:00:00 | INFO | {tag} | {json.dumps(record)}\n"


def fairseq_log(epochs: int, loss: float, drop: float | None = None, updates: int = 10, **scores: float) -> str:
    """A log: losses that fall to `loss` and rise again, scores that rise, and a drop rate for each site."""
    lines = []
    for epoch in range(1, epochs + 1):
        end, valid = epoch * updates, loss + 0.1 * abs(epoch - 0.7 * epochs)
        rates = {} if drop is None else {f"drop_{site}": str(drop / (1 + n / epoch)) for n, site in enumerate(SITES)}
        shared = {"epoch": epoch, "update": float(epoch)}
        lines.append(_line("train_inner", {**shared, "loss": "1", "num_updates": str(end), **rates}))
        figures = {"valid_nll_loss": str(valid), "valid_num_updates": str(end), "valid_wps": "9"}
        figures |= {f"valid_{name}": str(value * epoch / epochs) for name, value in scores.items()}
        lines.append(_line("valid", {"epoch": epoch, **figures}))
        training = {"train_nll_loss": str(2 * loss / epoch), "train_train_wall": "4", "train_num_updates": str(end)}
        lines.append(_line("train", {"epoch": epoch, **training}))
    return "".join(lines)


def make_run(folder: Path, settings: Mapping[str, Any], result: Mapping[str, Any], log: str) -> None:
    """The folder of one run."""
    folder.mkdir(parents=True)
    for name, content in (("run.json", settings), ("result.json", result)):
        if content:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "train.log").write_text(log, encoding="utf-8")


def make_comparison(
    root: Path, methods: Mapping[str, float], seeds: tuple[int, ...] = (1, 2, 3), drop: float = 0.3
) -> Path:
    """Translation: methods and their BLEU, which is a little higher for each further seed."""
    for method, bleu in methods.items():
        for seed in seeds:
            scores = {"test": {"bleu": bleu + seed / 10, "chrf": 2 * bleu, "bleu_signature": "tok:13a"}}
            training = {"epochs": 6, "best_valid_loss": 100 / bleu, "loss": "nll_loss", "best_epoch": 5}
            result = {
                "training": {**training, "seconds_per_epoch": 4.0 + 2 * (method != "plain")},
                "translation": {"flags": "--beam 5", "scores": scores},
            }
            flags = f"--lr 0.001 --adam-betas '(0.9, 0.98)' --seed {seed} --attn-reg {method}"
            settings = {"data": "abc", "task": "attn_reg_translation", "seed": seed, "flags": flags}
            log = fairseq_log(6, 100 / bleu, None if method == "plain" else drop)
            make_run(root / f"{method}-seed{seed}", settings, result, log)
    rows = [{"method": method, "title": method.replace("_", " ").upper()} for method in methods]
    content = {"pair": ["en", "ro"], "signatures": {"bleu": "tok:13a"}, "methods": rows, "runs": {}}
    (root / "results.json").write_text(json.dumps(content), encoding="utf-8")
    return root


def make_fine_tuning(
    root: Path, methods: Mapping[str, float], seeds: tuple[int, ...] = (1, 2), task: str = "rte"
) -> Path:
    """A labelled task: methods and their accuracy."""
    for method, accuracy in methods.items():
        for seed in seeds:
            training = {"epochs": 3, "best_epoch": 3, "scores": {"accuracy": accuracy + seed}}
            settings = {"data": "def", "task": task, "model": "m", "seed": seed, "flags": f"--attn-reg {method}"}
            log = fairseq_log(3, 1.0, accuracy=accuracy)
            result = {"training": {**training, "seconds_per_epoch": None}}
            make_run(root / f"{method}-seed{seed}", settings, result, log)
    return root


def make_trainer(folder: Path, loss: float = 0.5, drop: float | None = None, finished: bool = True) -> Path:
    """A training of Trainer of two epochs, with an evaluation after each."""
    history: list[dict[str, Any]] = []
    for step in range(1, 5):
        rates = {} if drop is None else {"drop_encoder.self[0]": drop * math.sqrt(step / 4)}
        history.append({"epoch": step / 2, "step": step, "loss": loss + 1 / step, "regularized": 1.0, **rates})
        if step % 2 == 0:
            history.append({"epoch": step / 2, "step": step, "eval_loss": loss, "eval_f1": step / 4, "eval_runtime": 1})
    if finished:
        history.append({"epoch": 2.0, "step": 4, "train_runtime": 6.0, "train_loss": loss})
    state = {"epoch": 2.0, "global_step": 4, "log_history": history, "num_train_epochs": 2, "train_batch_size": 8}
    checkpoint = folder / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 2}', encoding="utf-8")
    (folder / "checkpoint-2").mkdir()
    for where, content in ((checkpoint, state), (folder / "checkpoint-2", {**state, "log_history": []})):
        (where / "trainer_state.json").write_text(json.dumps(content), encoding="utf-8")
    if drop is not None:
        (checkpoint / "attn_reg_ad_drop.pt").touch()
    return folder
