"""How often scores of whole tokens choose the planted word, of classifiers that rely on one:

    python scripts/evidence_scores.py DATA RUN... > examples/evidence/scores/middle.json

RUN are plain trained runs with their checkpoints, of `attn-reg finetune --shortcut` or of the variant `middle` that
`evidence_data.py` made; DATA is SST-2's folder. Each development example gets the planted word of its label at the
beginning, or in its middle. Counted are, in percent, examples whose planted word is among the 10 % of the highest
score; F is the logit of the predicted class.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from evidence_data import PLANTS, planted
from evidence_runs import of_runs
from torch import Tensor, nn

from attn_reg_plugin import candidate_region
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


def of_path(model: nn.Module, ids: Tensor, by: float, label: int) -> Tensor:
    """∂F/∂β, (S)."""
    beta = torch.zeros(ids.shape, requires_grad=True)
    with scaled_values(model, by):
        outputs = model(ids, attention_mask=beta[:, None, None, :].expand(-1, 1, ids.size(1), -1))
    return torch.autograd.grad(outputs.logits[0, label], beta)[0][0]


def of_attention(outputs: Any, values: list[Tensor], label: int) -> dict[str, Tensor]:
    """Attention, that times the norm of each key's values, and ∂F/∂β weighted by this norm; each (S)."""
    found: dict[str, list[Tensor]] = {}
    gradients = torch.autograd.grad(outputs.logits[0, label], outputs.attentions)
    for attention, gradient, value in zip(outputs.attentions, gradients, values, strict=True):
        norm = value.unflatten(-1, (attention.size(1), -1)).norm(dim=-1).mT[:, :, None, :]
        slopes = attention * (gradient - (attention * gradient).sum(-1, keepdim=True))
        found.setdefault("gradient times the values' norm", []).append(slopes * norm)
        found.setdefault("attention times the values' norm", []).append(attention * norm)
        found.setdefault("attention", []).append(attention)
    return {title: torch.stack(layers).sum((0, 1, 2, 3)).detach() for title, layers in found.items()}


@torch.no_grad()
def of_hiding(model: nn.Module, ids: Tensor, label: int) -> Tensor:
    """Minus F where a token is hidden from every attention, one forward a token: (S)."""
    length = ids.size(1)
    return -model(ids.expand(length, -1), attention_mask=1 - torch.eye(length, dtype=torch.long)).logits[:, label]


def scores(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Every score of the tokens of one text, ids (1, S), (S) each."""
    with scaled_values(model, 1.0) as values:
        outputs = model(ids, output_attentions=True)
    label = int(outputs.logits.argmax())
    found = {title: of_path(model, ids, by, label) for title, by in PATH.items()}
    return {**found, **of_attention(outputs, values, label), "hidden one by one": of_hiding(model, ids, label)}


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
        ids = trained.tokenizer(text, return_tensors="pt")["input_ids"]
        place = ids[0].tolist().index(trained.tokenizer.convert_tokens_to_ids(word))
        for title, score in scores(model, ids).items():
            chosen = candidate_region(score[None, None, None, 1:-1], None, RATIO, "high")
            hits.setdefault(title, []).append(bool(chosen[..., place - 1]))
    return {title: 100 * sum(found) / len(found) for title, found in hits.items()}


if __name__ == "__main__":
    print(json.dumps(of_runs(measure, __doc__), indent=2))
