"""Measure trained classifiers on data of another distribution, and compare methods over their seeds:

    python robustness.py runs/mnli --hans heuristics_evaluation_set.txt --out robustness
    python robustness.py runs/qqp --pairs test_2k.tsv --out robustness

The folder has METHOD-seedN, runs of `attn-reg finetune` or folders for `from_pretrained`. HANS (McCoy, Pavlick
& Linzen, ACL 2019) tests models of MNLI or RTE: what is not entailment counts as non-entailment, and the accuracy is
also that of each heuristic and label, since a model that always says entailment is right on half. `--pairs` takes the
columns `sentence1`, `sentence2` and `label` (a number), such as PAWS-X for a model of QQP or MRPC.
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from attn_reg_plugin.experiments.converting import exported


@torch.no_grad()
def predict(folder: Path, examples: pd.DataFrame, size: int = 64) -> list[str]:
    """The label that a model gives each pair of sentences, by the name in its configuration."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: list[str] = []
    for start in range(0, len(examples), size):
        part = examples.iloc[start : start + size]
        pairs = part["sentence1"].tolist(), part["sentence2"].tolist()
        inputs = tokenizer(*pairs, padding=True, truncation=True, return_tensors="pt")
        found += [model.config.id2label[index] for index in model(**inputs).logits.argmax(-1).tolist()]
    return found


def read_hans(path: Path) -> pd.DataFrame:
    """The pairs of HANS with the columns sentence1, sentence2, label and group, a heuristic and a label."""
    found = pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False)
    found = found.rename(columns={"gold_label": "label"})
    return found.assign(group=found["heuristic"] + ", " + found["label"])


def read_pairs(path: Path) -> pd.DataFrame:
    """Labelled pairs, all in the group `all`."""
    found = pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False)
    return found.assign(label=found["label"].astype(str), group="all")


def accuracies(folders: list[Path], examples: pd.DataFrame, hans: bool) -> pd.DataFrame:
    """Accuracy in percent by method, seed and group; `all` is that of all examples."""
    rows = []
    for folder in folders:
        method, _, seed = folder.name.rpartition("-seed")
        said = pd.Series(predict(exported(folder), examples), index=examples.index)
        if hans:
            said = said.where(said == "entailment", "non-entailment")
        said = said.str.removeprefix("LABEL_")
        if not set(said) & set(examples["label"]):
            known, wanted = (", ".join(sorted(set(labels))) for labels in (said, examples["label"]))
            sys.exit(f"{folder} says {known}, but the labels of the pairs are {wanted}")
        right = 100.0 * (said == examples["label"])
        by_group = {**right.groupby(examples["group"]).mean(), "all": right.mean()}
        rows += [(method, int(seed), group, value) for group, value in by_group.items()]
        print(f"{folder.name}: {right.mean():.2f}" + (" (one label for every example)" if said.nunique() == 1 else ""))
    return pd.DataFrame(rows, columns=["method", "seed", "group", "accuracy"])


def plot(found: pd.DataFrame, path: Path) -> None:
    """A row of points for each group, a mark a method: the mean over seeds."""
    means = found.groupby(["group", "method"])["accuracy"].mean().unstack()
    figure, panel = plt.subplots(figsize=(7, 1.2 + 0.35 * len(means)), layout="constrained")
    for mark, method in zip("os^DvXP" * len(means.columns), means.columns, strict=False):
        panel.plot(means[method], means.index, mark, label=method.replace("$", r"\$"))
    panel.set(xlabel="accuracy, %", xlim=(-2, 102))
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, and write robustness.csv (a row per run and group), .md (means over seeds) and .png."""
    logging.basicConfig(level=logging.WARNING)  # else fairseq prints debug messages of all
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    test = parser.add_mutually_exclusive_group(required=True)
    test.add_argument("--hans", type=Path)
    test.add_argument("--pairs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("robustness"))
    arguments = parser.parse_args()
    examples = read_hans(arguments.hans) if arguments.hans else read_pairs(arguments.pairs)
    folders = sorted(path for path in arguments.models.glob("*-seed*") if path.is_dir())
    if not folders:
        parser.error(f"{arguments.models} has no runs, METHOD-seedN")
    found = accuracies(folders, examples, bool(arguments.hans))
    table = found.groupby(["method", "group"])["accuracy"].agg(["mean", "std", "count"]).round(2).reset_index()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found.to_csv(arguments.out / "robustness.csv", index=False)
    (arguments.out / "robustness.md").write_text(table.to_markdown(index=False) + "\n", encoding="utf-8")
    plot(found, arguments.out / "robustness.png")
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
