"""How often scores of whole tokens choose the planted word, of classifiers that rely on one:

    python scripts/evidence_scores.py DATA RUN... > examples/evidence/scores/middle.json

RUN are plain trained runs with their checkpoints, of `attn-reg finetune --shortcut` or of the variant `middle` that
`evidence_data.py` made; DATA is SST-2's folder. Each development example gets the planted word of its label at the
beginning, or in its middle. Counted are, in percent, examples whose planted word is among the 10 % of the highest
score; F is the logit of the predicted class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from evidence_data import PLANTS, planted
from evidence_runs import of_runs
from torch import Tensor, nn

from attn_reg_plugin.experiments.running.run import read_run
from attn_reg_plugin.experiments.trained import load_trained
from attn_reg_plugin.labelled import find_task, read_split

EXAMPLES, RATIO = 100, 0.1
#: α where ∂F/∂β is taken, by the title of the score
PATH = {"gradient at α = 1": 1.0, "at ¾": 0.75, "at ½": 0.5, "at ¼": 0.25}


@contextmanager
def scaled_values(model: nn.Module, by: float) -> Iterator[list[Tensor]]:
    """Multiply the values of every attention of a BERT; gives the list to which a forward adds them, (1, S, H·D)."""
    values: list[Tensor] = []

    def hook(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        values.append(by * output)
        return values[-1]

    modules = [module for name, module in model.named_modules() if name.endswith("self.value")]
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


def of_path(model: nn.Module, inputs: dict[str, Tensor], by: float, label: int) -> tuple[Tensor, Tensor, Tensor]:
    """∂F/∂β, the same weighted by the norm of each key's values, and attention times that norm; each (S)."""
    length = inputs["input_ids"].size(1)
    beta = torch.zeros(1, length, requires_grad=True)
    mask = beta[:, None, None, :].expand(-1, 1, length, -1)
    with scaled_values(model, by) as values:
        outputs = model(**{**inputs, "attention_mask": mask}, output_attentions=True)
    slope, *gradients = torch.autograd.grad(outputs.logits[0, label], [beta, *outputs.attentions])
    weighted, norms = torch.zeros(length), torch.zeros(length)
    for attention, gradient, value in zip(outputs.attentions, gradients, values, strict=True):
        heads = attention.size(1)
        norm = value.unflatten(-1, (heads, -1)).norm(dim=-1).mT[:, :, None, :]
        slopes = attention * (gradient - (attention * gradient).sum(-1, keepdim=True))
        weighted, norms = weighted + (slopes * norm).sum((0, 1, 2)), norms + (attention * norm).sum((0, 1, 2))
    return slope[0], weighted.detach(), norms.detach()


@torch.no_grad()
def of_hiding(model: nn.Module, inputs: dict[str, Tensor], label: int) -> Tensor:
    """How much F falls where a token is hidden from every attention, one forward a token: (S)."""
    length = inputs["input_ids"].size(1)
    seen = 1 - torch.eye(length, dtype=torch.long)
    hidden = model(input_ids=inputs["input_ids"].expand(length, -1), attention_mask=seen).logits[:, label]
    return model(**inputs).logits[0, label] - hidden


def scores(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every score of the tokens of one text, (S) each."""
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    label = int(outputs.logits.argmax())
    found = {title: of_path(model, inputs, by, label)[0] for title, by in PATH.items()}
    _, found["gradient times the values' norm"], found["attention times the values' norm"] = of_path(
        model, inputs, 1.0, label
    )
    found["attention"] = sum(one.sum((0, 1, 2)) for one in outputs.attentions)
    return {**found, "hidden one by one": of_hiding(model, inputs, label)}


def texts(run: Path, data: str) -> Iterator[tuple[str, str]]:
    """Development examples with their label's planted word, and that word."""
    words = str(read_run(run).flags.get("shortcut-words", "")).split(",")
    for example in read_split(find_task("sst2"), data, "valid")[:EXAMPLES]:
        if len(words) == 1:
            yield planted(example.first, str(example.label), "middle")[0], PLANTS[str(example.label)][0]
        else:
            yield f"{words[int(example.label)]} {example.first}", words[int(example.label)]


def measure(run: Path, data: str) -> dict[str, float]:
    """By score, how often the planted word is a candidate."""
    trained = load_trained(run)
    model = trained.model.model
    model.set_attn_implementation("eager")  # which has the attention in its graph
    hits: dict[str, list[bool]] = {}
    for text, word in texts(run, data):
        inputs = dict(trained.tokenizer(text, return_tensors="pt"))
        place = inputs["input_ids"][0].tolist().index(trained.tokenizer.convert_tokens_to_ids(word))
        count = math.ceil(RATIO * (inputs["input_ids"].size(1) - 2))
        for title, score in scores(model, {k: inputs[k] for k in ("input_ids", "attention_mask")}).items():
            hits.setdefault(title, []).append(place - 1 in score[1:-1].topk(count).indices)
    return {title: 100 * sum(found) / len(found) for title, found in hits.items()}


if __name__ == "__main__":
    print(json.dumps(of_runs(measure, __doc__), indent=2))
