"""Folders as `attn-reg compare` and `attn-reg finetune` leave them, without any training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def log_line(tag: str, record: Mapping[str, object]) -> str:
    """A line as fairseq logs it: numbers are text."""
    return f"2026-01-01 00:00:00 | INFO | {tag} | {json.dumps(record)}\n"


def fairseq_log(epochs: int, loss: float, updates: int = 10, **scores: float) -> str:
    """A log: losses that fall to `loss` and rise again, and scores that rise."""
    lines = []
    for epoch in range(1, epochs + 1):
        end, valid = epoch * updates, loss + 0.1 * abs(epoch - 0.7 * epochs)
        shared = {"epoch": epoch, "update": float(epoch)}
        lines.append(log_line("train_inner", {**shared, "loss": "1", "num_updates": str(end)}))
        figures = {"valid_nll_loss": str(valid), "valid_num_updates": str(end), "valid_wps": "9"}
        figures |= {f"valid_{name}": str(value * epoch / epochs) for name, value in scores.items()}
        lines.append(log_line("valid", {"epoch": epoch, **figures}))
        training = {"train_nll_loss": str(2 * loss / epoch), "train_train_wall": "4", "train_num_updates": str(end)}
        lines.append(log_line("train", {"epoch": epoch, **training}))
    return "".join(lines)


def make_run(folder: Path, settings: Mapping[str, Any], result: Mapping[str, Any], log: str) -> None:
    """The folder of a run."""
    folder.mkdir(parents=True)
    for name, content in (("run.json", settings), ("result.json", result)):
        if content:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "train.log").write_text(log, encoding="utf-8")


def make_comparison(root: Path, methods: Mapping[str, float], seeds: tuple[int, ...] = (1, 2, 3)) -> Path:
    """Translation: methods and their BLEU, which is a little higher for each further seed."""
    for method, bleu in methods.items():
        for seed in seeds:
            flags = {"lr": 0.001, "adam-betas": "(0.9, 0.98)", "attn-reg": method.replace("plain", "none")}
            settings = {"kind": "translation", "task": "en-ro", "data": "abc", "method": method, "seed": seed}
            seconds = 4.0 + 2 * (method != "plain")
            training = {"epochs": 6, "best_epoch": 5, "seconds_per_epoch": seconds, "figures": {}}
            scores = {"test": {"bleu": bleu + seed / 10, "chrf": 2 * bleu}, "valid": {"nll_loss": 100 / bleu}}
            result = {"training": training, "scores": scores, "constant": [], "signatures": ["BLEU tok:13a"]}
            log = fairseq_log(6, 100 / bleu)
            make_run(root / f"{method}-seed{seed}", {**settings, "flags": flags}, result, log)
    rows = [{"method": method, "title": method} for method in methods]
    content = {"task": "en-ro", "signatures": ["BLEU tok:13a"], "methods": rows, "runs": {}}
    (root / "results.json").write_text(json.dumps(content), encoding="utf-8")
    return root


def make_fine_tuning(root: Path, right: Mapping[str, tuple[int, ...]], kind: str = "classification") -> Path:
    """A labelled task: methods and how many of 20 examples each of their seeds has right."""
    labels = ["entailment", "not_entailment"] if kind == "classification" else ["NN", "VB"]
    for method, counts in right.items():
        for seed, count in enumerate(counts, start=1):
            settings = {"kind": "labelled", "task": "rte", "data": "def", "method": method, "seed": seed, "flags": {}}
            settings |= {"task_kind": kind, "labels": labels}
            training = {"epochs": 3, "best_epoch": 3, "seconds_per_epoch": 2.0, "figures": {}}
            scores = {"valid": {"accuracy": 5.0 * count}}
            folder = root / f"{method}-seed{seed}"
            constant = ["valid"] * (count == 20)
            result = {"training": training, "scores": scores, "constant": constant}
            make_run(folder, settings, result, fairseq_log(3, 1.0, accuracy=5.0 * count))
            lines = "".join(
                f"{labels[place >= count]}\t{labels[0]}\n" + "\n" * (kind == "tagging") for place in range(20)
            )
            (folder / "predictions").mkdir()
            (folder / "predictions" / "valid.tsv").write_text(f"prediction\tgold\n{lines}", encoding="utf-8")
    return root
