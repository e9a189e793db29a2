"""AttendOut's game on tiny models: problems, a training to begin and an update of it."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from attn_reg_plugin import AttendOut
from attn_reg_plugin.regularizers import Outcome, Tokens
from tests.attention.tiny_model import PAD, TinyClassifier, tokens

BATCHES = [(tokens([6, 4, 2], 6, seed=seed), torch.tensor([0, 1, 2])) for seed in range(12)]


class TokensOnly:
    """Names the encoder's tokens, under `key` of the inputs; a test that asks for a loss fails."""

    key = "tokens"

    def __init__(self, key: str = key) -> None:
        self.key = key

    def loss(self, model: nn.Module, inputs: Any) -> Outcome:
        raise NotImplementedError

    def validation(self, n: int) -> Any:
        raise NotImplementedError

    def tokens(self, inputs: Any) -> dict[str, Tokens]:
        ids = inputs[self.key]
        return {"encoder": Tokens(ids, ids.ne(PAD))}


class Classification(TokensOnly):
    """Cross-entropy on tiny batches, as AttendOut sees it."""

    def loss(self, model: nn.Module, inputs: Any) -> Outcome:
        logits = model(inputs["tokens"])
        losses = F.cross_entropy(logits, inputs["labels"], reduction="mean" if model.training else "none")
        return Outcome(losses, (logits.argmax(-1) == inputs["labels"]).float())

    def validation(self, n: int) -> Any:
        for index in torch.randint(len(BATCHES), (n,)).tolist():
            ids, labels = BATCHES[index]
            yield {"tokens": ids[:1], "labels": labels[:1]}


def begin(seed: int = 0, **options: Any) -> tuple[nn.Module, Optimizer, AttendOut]:
    """A model, its optimizer and a method whose rounds have three updates."""
    torch.manual_seed(seed)
    model = TinyClassifier().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, AttendOut(problem=Classification(), optimizer=optimizer, steps=3, **options)


def update(model: nn.Module, optimizer: Optimizer, method: AttendOut | None, number: int, examples: int = 3) -> None:
    """Make an update as a loop does; randomness depends on the number only, as under fairseq."""
    torch.manual_seed(100 + number)
    ids, labels = (part[:examples] for part in BATCHES[number % len(BATCHES)])
    F.cross_entropy(model(ids, labels), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    if method is not None:
        method.end_update()


def play(model: nn.Module, optimizer: Optimizer, method: AttendOut | None, numbers: Iterable[int]) -> None:
    """Several updates."""
    for number in numbers:
        update(model, optimizer, method, number)


def same(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models have equal parameters."""
    return all(one.equal(other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
