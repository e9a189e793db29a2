"""How often AD-DROP's candidates hit a planted word, and how much of the attention is on it:

    python scripts/evidence_candidates.py DATA RUN... > examples/evidence/candidates.json

RUN are trained runs of `attn-reg finetune --shortcut X` with their checkpoints, DATA their folder. Each development
example gets the planted word of its label. Counted are attention rows with any attribution: in the last layer of a
classifier these are the rows of the first token, all others are ties.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from evidence_runs import of_runs
from torch import Tensor

from attn_reg_plugin import candidate_region
from attn_reg_plugin.experiments.running.run import read_run
from attn_reg_plugin.experiments.trained import load_trained
from attn_reg_plugin.labelled import find_task, read_split

EXAMPLES, RATIO = 100, 0.3
#: positions of `[CLS] planted w w w [SEP]`
KINDS = {"planted": 1, "first": 0, "last": -1}
#: what is counted of each kind
FIGURES = ("candidates", "weighted_candidates", "attention")


def of_map(attention: Tensor, attribution: Tensor) -> Iterator[tuple[str, list[float]]]:
    """Count over rows how often each kind of position is a candidate, by ∂F/∂A and A ⊙ ∂F/∂A, and take its attention.

    Args:
        attention, attribution: (1, H, T, T).
    """
    rows = attribution[0].flatten(0, 1).abs().sum(-1) > 0
    maps = [
        candidate_region(attribution, None, RATIO, "high"),
        candidate_region(attention * attribution, None, RATIO, "high"),
        attention,
    ]
    chosen = [one[0].flatten(0, 1)[rows].double() for one in maps]
    for kind, place in KINDS.items():
        yield kind, [float(one[:, place].mean()) for one in chosen]
    yield "other", [float(one[:, 2:-1].mean()) for one in chosen]


def measure(run: Path, data: str) -> dict[str, list[dict[str, float]]]:
    """By kind of position, a row for each layer; the attribution is of the logit of the predicted class."""
    trained = load_trained(run)
    model, words = trained.model.model, str(read_run(run).flags["shortcut-words"]).split(",")
    model.set_attn_implementation("eager")  # which has the attention in its graph
    found: dict[str, dict[int, list[list[float]]]] = {}
    for example in read_split(find_task("sst2"), data, "valid")[:EXAMPLES]:
        inputs = trained.tokenizer(f"{words[int(example.label)]} {example.first}", return_tensors="pt")
        outputs = model(**inputs, output_attentions=True)
        attributions = torch.autograd.grad(outputs.logits.max(), outputs.attentions)
        for layer, (attention, attribution) in enumerate(zip(outputs.attentions, attributions, strict=True)):
            for kind, figures in of_map(attention.detach(), attribution):
                found.setdefault(kind, {}).setdefault(layer, []).append(figures)
    means = {
        kind: [torch.tensor(layers[layer]).mean(0).tolist() for layer in sorted(layers)]
        for kind, layers in found.items()
    }
    return {kind: [dict(zip(FIGURES, layer, strict=True)) for layer in layers] for kind, layers in means.items()}


if __name__ == "__main__":
    print(json.dumps({"p": RATIO, "examples": EXAMPLES, "runs": of_runs(measure, __doc__)}, indent=2))
