"""Drop what a trained classifier attends to, by attribution, and draw its attention and attribution of a text:

    python probe.py runs/rte/plain-seed1 data/RTE/dev.tsv --columns sentence1 sentence2 label --out probe

The model is a run of `attn-reg finetune`, or a folder for `from_pretrained`. The examples are a table with tabs; its
columns are a text, maybe a second one, and the label, a number or a name in the model's configuration. `dropping.png`
is AD-DROP's prior experiment (Yang et al. 2022, figure 2): in each attention row the share p with the highest
attributions, with the lowest, or a random one is dropped, and loss and accuracy are measured. `maps.png` is its
figure 1: the attention and the attribution of one text, layer by layer.
"""

from __future__ import annotations

import argparse
import csv
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from attn_reg_plugin import ADDrop
from attn_reg_plugin.experiments.converting import exported

#: positions that are dropped -> options of AD-DROP, and how their line looks, in grey too
WHICH = {
    "high attribution": ({}, {"color": "#440154", "linestyle": "-", "marker": "o"}),
    "low attribution": ({"direction": "low"}, {"color": "#2a9d6f", "linestyle": "--", "marker": "s"}),
    "random": ({"attribution": "random"}, {"color": "#6c8ebf", "linestyle": "-.", "marker": "^"}),
}
RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)


def load(folder: Path) -> tuple[Any, Any]:
    """A model without dropout, since masks act in training mode only, and its tokenizer."""
    config = AutoConfig.from_pretrained(folder)
    for name, value in config.to_dict().items():
        if "dropout" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config)
    return model.train(), AutoTokenizer.from_pretrained(folder)


def read(path: Path, columns: list[str], label2id: dict[str, int]) -> pd.DataFrame:
    """The examples: columns of texts, and `label` with the number of the class."""
    found = pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False, dtype=str)[columns]
    labels = [label2id[name] if name in label2id else int(name) for name in found[columns[-1]]]
    return found[columns[:-1]].assign(label=labels)


def batches(
    examples: pd.DataFrame, tokenizer: Any, size: int
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Inputs and labels."""
    for start in range(0, len(examples), size):
        part = examples.iloc[start : start + size]
        texts = [part[name].tolist() for name in part.columns[:-1]]
        inputs = tokenizer(*texts, padding=True, truncation=True, return_tensors="pt")
        yield inputs, torch.tensor(part["label"].tolist())


def measure(model: Any, data: list[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> tuple[float, float]:
    """Mean loss and accuracy in percent."""
    loss = right = count = 0.0
    for inputs, labels in data:
        logits = model(**inputs).logits.detach()
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        right += float((logits.argmax(-1) == labels).sum())
        count += len(labels)
    return loss / count, 100 * right / count


def dropping(model: Any, data: list[tuple[dict[str, torch.Tensor], torch.Tensor]], sites: str) -> pd.DataFrame:
    """Loss and accuracy with nothing dropped, and for every ratio p with high, low and random positions dropped."""
    rows = [("nothing", 0.0, *measure(model, data))]
    for which, (options, _) in WHICH.items():
        for p in RATIOS:
            torch.manual_seed(1)
            regularizer = ADDrop(p=p, q=1.0, cross_tuning="off", probe_dropout=False, sites=sites, **options)
            with regularizer.attach(model):
                rows.append((which, p, *measure(model, data)))
    return pd.DataFrame(rows, columns=["dropped", "p", "loss", "accuracy"])


def plot_dropping(found: pd.DataFrame, path: Path) -> None:
    """A panel for the loss and a panel for the accuracy, a line for each kind of positions."""
    figure, panels = plt.subplots(1, 2, figsize=(8.8, 3.6), layout="constrained")
    nothing = found[found["dropped"] == "nothing"]
    for panel, column, label in zip(panels, ("loss", "accuracy"), ("loss, nats", "accuracy, %"), strict=True):
        for which, (_, look) in WHICH.items():
            line = pd.concat([nothing, found[found["dropped"] == which]])
            panel.plot(line["p"], line[column], label=which, **look)
        panel.axhline(nothing[column].item(), color="black", linestyle=":", label="nothing dropped")
        panel.set(xlabel="p, the share of each row that is dropped", ylabel=label)
        panel.grid(alpha=0.3)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def maps(model: Any, tokenizer: Any, texts: list[str]) -> tuple[list[str], list[torch.Tensor], list[torch.Tensor]]:
    """Tokens, and the attention A and the attribution ∂F/∂A of each layer, (H, T, T); F is the predicted logit."""
    inputs = tokenizer(*texts, truncation=True, return_tensors="pt")
    model.set_attn_implementation("eager")  # which has the map in its graph
    outputs = model(**inputs, output_attentions=True)
    attributions = torch.autograd.grad(outputs.logits.max(), outputs.attentions)
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    return tokens, [one[0].detach() for one in outputs.attentions], [one[0] for one in attributions]


def plot_maps(
    tokens: list[str], attentions: list[torch.Tensor], attributions: list[torch.Tensor], layers: list[int], path: Path
) -> None:
    """A pair of maps a layer, averaged over heads."""
    layers = layers or list(range(len(attentions)))
    rows, cell = len(layers), 0.22 * len(tokens) + 1.4
    figure, panels = plt.subplots(rows, 2, figsize=(2 * cell, rows * cell), layout="constrained", squeeze=False)
    for row, layer in zip(panels, layers, strict=True):
        both = attentions[layer], attributions[layer]
        for panel, found, name in zip(row, both, ("attention A", "attribution ∂F/∂A"), strict=True):
            image = panel.imshow(found.mean(0), cmap="Greys" if name == "attention A" else "viridis")
            panel.set_title(f"layer {layer}: {name}", fontsize=9)
            shown = [token.replace("$", r"\$") for token in tokens]
            panel.set_xticks(range(len(tokens)), shown, rotation=90, fontsize=8)
            panel.set_yticks(range(len(tokens)), shown, fontsize=8)
            figure.colorbar(image, ax=panel, shrink=0.8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, draw, and write probe.csv."""
    logging.basicConfig(level=logging.WARNING)  # else fairseq prints debug messages of all
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("examples", type=Path)
    parser.add_argument("--columns", nargs="+", default=["text", "label"], help="of the texts, and of the label")
    parser.add_argument("--count", type=int, default=200, help="the first so many examples")
    parser.add_argument("--out", type=Path, default=Path("probe"))
    parser.add_argument("--sites", default="encoder.self", help="which attention, such as 'encoder.self[0,5]'")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--row", type=int, default=0, help="the example whose maps are drawn")
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="of the maps (default: all)")
    arguments = parser.parse_args()
    model, tokenizer = load(exported(arguments.model))
    examples = read(arguments.examples, arguments.columns, model.config.label2id)[: arguments.count]
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = dropping(model, list(batches(examples, tokenizer, arguments.batch_size)), arguments.sites)
    found.to_csv(arguments.out / "probe.csv", index=False)
    plot_dropping(found, arguments.out / "dropping.png")
    texts = examples.iloc[arguments.row, :-1].tolist()
    plot_maps(*maps(model, tokenizer, texts), arguments.layers, arguments.out / "maps.png")
    print(found.to_string(index=False))


if __name__ == "__main__":
    main()
