"""Predict with a classifier that `attn-reg export` or Trainer wrote, in the format that GLUE takes:

python predict.py EXPORTED test.tsv --columns sentence1 sentence2 --out RTE.tsv
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def main(argv: list[str] | None = None) -> None:
    """Write a header and a line `index<TAB>prediction` per example: the label's name, or a value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("examples", type=Path)
    parser.add_argument("--columns", nargs="+", required=True, help="of the text, or of both texts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args(argv)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    table = pd.read_csv(arguments.examples, sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False, dtype=str)
    found = []
    for start in range(0, len(table), arguments.batch_size):
        part = table.iloc[start : start + arguments.batch_size]
        texts = [part[name].tolist() for name in arguments.columns]
        with torch.no_grad():
            logits = model(**tokenizer(*texts, padding=True, truncation=True, return_tensors="pt")).logits
        if model.config.num_labels == 1:
            found += [f"{float(row[0]):.3f}" for row in logits]
        else:
            found += [model.config.id2label[int(row.argmax())] for row in logits]
    pd.DataFrame({"prediction": found}).to_csv(arguments.out, sep="\t", index_label="index")


if __name__ == "__main__":
    main()
