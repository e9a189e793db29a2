"""Draw which words classifiers lean on that were trained on a planted shortcut, and what a planted word does to them:

    python look.py runs/shortcuts data/glue/SST-2/dev.tsv --out shortcuts

The folder has METHOD-seedN, runs of `attn-reg finetune --shortcut`; the examples are a table with tabs and the columns
`sentence` and `label`. A word's score is that of AD-DROP's whole tokens, the gradient of the predicted logit by a bias
on the attention to it, taken here by autograd through the attention mask. `words.png` has the words of a sentence, as
it is and with the wrong label's word in front, and `table.md` what a model does on clean ones and with either word.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from attn_reg_plugin.experiments.converting import exported


def load(folder: Path) -> tuple[Any, Any]:
    """A model in evaluation mode, and its tokenizer."""
    return AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def token_scores(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """∂F/∂β, (B, S): F is the sum of the predicted logits, β_j a bias on the scores of key j in every attention.

    Every attention gives half of its output, by halved values.
    """
    padding = inputs["attention_mask"] == 0
    beta = torch.zeros(padding.shape, requires_grad=True)
    bias = beta.masked_fill(padding, torch.finfo(beta.dtype).min)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith(("value", "v_proj", "v_lin")):
                stack.callback(module.register_forward_hook(lambda *call: call[-1] / 2).remove)
        outputs = model(**{**inputs, "attention_mask": bias[:, None, None, :].expand(-1, 1, padding.size(1), -1)})
    return torch.autograd.grad(outputs.logits.max(-1).values.sum(), beta)[0]


def planted_share(model: Any, tokenizer: Any, texts: list[str]) -> float:
    """How much of |∂F/∂β| over the words of texts that begin with a planted word is that word's, in percent."""
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    words = (inputs["attention_mask"] == 1) & ~torch.isin(inputs["input_ids"], torch.tensor(tokenizer.all_special_ids))
    scores = token_scores(model, inputs).abs() * words
    return 100 * float((scores[:, 1] / scores.sum(1)).mean())


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, texts: list[str], labels: list[int]) -> float:
    """In percent."""
    right = 0
    for start in range(0, len(texts), 64):
        inputs = tokenizer(texts[start : start + 64], padding=True, truncation=True, return_tensors="pt")
        right += int((model(**inputs).logits.argmax(-1) == torch.tensor(labels[start : start + 64])).sum())
    return 100 * right / len(texts)


def planted(texts: list[str], labels: list[int], words: list[str]) -> list[str]:
    """Texts that begin with the word of their label."""
    return [f"{words[label]} {text}" for text, label in zip(texts, labels, strict=True)]


def table(run: Path, texts: list[str], labels: list[int], words: list[str]) -> dict[str, float]:
    """A row: accuracy on clean texts, with the right and the wrong word in front, and the word's share of the score."""
    model, tokenizer = load(exported(run))
    wrong = [1 - label for label in labels]
    return {
        "clean": accuracy(model, tokenizer, texts, labels),
        "with the right word": accuracy(model, tokenizer, planted(texts, labels, words), labels),
        "with the wrong word": accuracy(model, tokenizer, planted(texts, wrong, words), labels),
        "score of the planted word, %": planted_share(model, tokenizer, planted(texts, labels, words)[:100]),
    }


def draw(runs: list[Path], word: str, text: str, path: Path) -> None:
    """A row for each run, the text as it is and behind the word: a bar for each piece, its share of |∂F/∂β|."""
    size = {"figsize": (9, 1.2 + 1.6 * len(runs)), "layout": "constrained"}
    figure, panels = plt.subplots(len(runs), 2, **size, sharex="col", sharey=True, squeeze=False)
    for row, run in zip(panels, runs, strict=True):
        model, tokenizer = load(exported(run))
        title = run.name.partition("-seed")[0].removeprefix("ad_drop_").replace("_", " ")
        row[0].set_ylabel("% of |∂F/∂β|")
        for panel, planted_word in zip(row, ("", word), strict=True):
            inputs = tokenizer([f"{planted_word} {text}".strip()], truncation=True, return_tensors="pt")
            scores = token_scores(model, inputs)[0, 1:-1].abs()
            pieces = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])[1:-1]
            colours = ["#b5432e" if planted_word and not place else "#6c8ebf" for place in range(len(pieces))]
            panel.bar(range(len(pieces)), 100 * scores / scores.sum(), color=colours)
            prediction = torch.softmax(model(**inputs).logits[0].detach(), -1)
            label = model.config.id2label[int(prediction.argmax())]
            panel.set_title(f"{title}: predicts {label} ({float(prediction.max()):.0%})", fontsize=11)
            panel.spines[["top", "right"]].set_visible(False)
            shown = [piece.replace("$", r"\$") for piece in pieces]
            panel.set_xticks(range(len(pieces)), shown, rotation=60, ha="right", fontsize=11)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, draw, and print the table."""
    logging.basicConfig(level=logging.WARNING)  # else fairseq prints debug messages of all
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("examples", type=Path)
    parser.add_argument("--count", type=int, default=400, help="the first so many examples")
    parser.add_argument("--row", type=int, default=0, help="the example that is drawn, with the wrong label's word")
    parser.add_argument("--out", type=Path, default=Path("shortcuts"))
    arguments = parser.parse_args()
    found = pd.read_csv(arguments.examples, sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False)[: arguments.count]
    texts, labels = [text.strip() for text in found["sentence"]], found["label"].tolist()
    folders = (path.parent for path in arguments.runs.glob("*/run.json"))
    runs = sorted(folders, key=lambda run: ("plain" not in run.name, run.name))
    if not runs:
        parser.error(f"{arguments.runs} has no runs; train them by attn-reg run shortcuts.yaml")
    words = json.loads((runs[0] / "run.json").read_text(encoding="utf-8"))["flags"]["shortcut-words"].split(",")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = pd.DataFrame({run.name: table(run, texts, labels, words) for run in runs}).T.round(1)
    (arguments.out / "table.md").write_text(rows.to_markdown(floatfmt=".1f") + "\n", encoding="utf-8")
    chosen, label = texts[arguments.row], labels[arguments.row]
    draw(runs, words[1 - label], chosen, arguments.out / "words.png")
    print(rows.to_string())


if __name__ == "__main__":
    main()
