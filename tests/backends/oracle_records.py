"""Records of transformers' models: the oracle's outcome, and of models that pass it what else was tried.

`scripts/models.py` writes these records to docs/models.json and makes the table of docs/models.md of them.
"""

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from attn_reg_plugin import ADDrop, find_sites
from attn_reg_plugin.backends.huggingface.modules import uncovered
from tests.backends.oracle_models import WORDS, accepted, apart, batch, compare, outcome, step, tiny

YES = "yes"
#: how far apart steps may be that are the same but for rounding
FAR = 1e-3
#: how a stock model says that it doesn't do something
STOCK = (ValueError, RuntimeError, TypeError, AttributeError, KeyError, IndexError)


def record(head: str, kind: str, name: str) -> dict[str, Any]:
    """Try a model and record what is found.

    Returns:
        `outcome`, see `oracle_models.outcome`, without a reason; `reason` unless it is `same`; and of those that are:
        `sites`, their kinds; `without`, the classes of attention that have none; `checkpointing` and, of causal
        models, `packed`: `yes`, `no` with a reason, or absent where the model itself doesn't do it.
    """
    found, _, reason = outcome(head, kind, name).partition(": ")
    if found != "same":
        return {"outcome": found, "reason": shortened(reason)}
    model = tiny(head, kind, name)
    inputs = accepted(model, batch(head, model))
    sites = find_sites(model, "*")
    kinds = dict.fromkeys(re.sub(r"\[\d+\]", "", site.name) for site in sites)
    made: dict[str, Any] = {"outcome": found, "sites": sorted(kinds)}
    if without := sorted(uncovered(model, {site.path for site in sites})):
        made["without"] = without
    for part, tried in (("checkpointing", checkpointed), ("packed", packed)):
        if part == "packed" and head != "causal":
            continue
        try:
            answer = tried(copy.deepcopy(model), inputs)
        except (ValueError, RuntimeError) as error:
            answer = f"no: {shortened(str(error))}"
        if answer is not None:
            made[part] = answer
    return made


def shortened(reason: str) -> str:
    """The first part of a message, without the names of sites and classes that begin it."""
    reason = " ".join(reason.split()).split("; ")[0]
    reason = re.sub(r"^\S+ \(\S+\):? ", "", reason)
    reason = re.sub(r"^\w+ masks keys", "it masks keys", reason)
    return re.sub(r"^\w+'s attention", "its attention", reason)[:160]


def checkpointed(model: nn.Module, inputs: dict[str, Tensor]) -> str | None:
    """Whether a regularized step is the same with activation checkpointing, as a stock step is."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return None
    model.config.use_cache = False
    other = copy.deepcopy(model)
    try:
        other.activation_checkpointing_enable({"use_reentrant": False})
        if max(apart(step(other, inputs), step(model, inputs))) > FAR:
            return None
    except STOCK:
        return None
    steps = []
    for one in (model, other):
        with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off").attach(one):
            steps.append(step(one, inputs))
    loss, gradients = apart(*steps)
    return YES if max(loss, gradients) <= FAR else f"no: gradients differ by {gradients:.1e}"


def packed(model: nn.Module, inputs: dict[str, Tensor]) -> str | None:
    """Whether texts that follow one another in a row, told apart by their positions, see nothing of each other."""
    ids = torch.randint(4, WORDS, (2, 8), generator=torch.Generator().manual_seed(6))
    places = torch.cat([torch.arange(3), torch.arange(5)]).expand(2, 8)
    model.config.use_cache = False  # with a cache, positions say nothing of texts
    row = accepted(model, {"input_ids": ids, "position_ids": places, "labels": ids})
    if "position_ids" not in row:
        return None
    try:
        expected, across = step(copy.deepcopy(model), row), _sees_across(model, row)
    except STOCK:
        return None
    if across:
        return None
    answer = compare(model, row, expected, (1e-4, 1e-4))
    return YES if answer == "same" else f"no: {answer}"


def _sees_across(model: nn.Module, row: dict[str, Tensor]) -> bool:
    """Whether the stock model's second text depends on the first."""
    other = row["input_ids"].clone()
    other[:, :3] = (other[:, :3] + 1) % (WORDS - 4) + 4
    with torch.no_grad():
        first, second = (model(**{**row, "input_ids": ids}).logits[:, 3:] for ids in (row["input_ids"], other))
    return not torch.allclose(first, second, atol=1e-5)
