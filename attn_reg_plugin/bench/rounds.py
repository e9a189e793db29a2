"""AttendOut in `attn-reg bench`: what it needs to know of the training, and a whole round with its parts timed.

A step is a round: T updates of the attacker and of the defender, each forward, loss, backward and Adam as a plain
step's, and then the evaluation, the generator's update and the copy of the winner. Seconds are those of the round over
T, so that what happens once a round is counted with its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attn_reg_plugin.bench.families import PADDING, Workload
from attn_reg_plugin.bench.rows import Row
from attn_reg_plugin.regularizers import Outcome, Tokens
from attn_reg_plugin.regularizers.base import build
from attn_reg_plugin.regularizers.attend_out.game import Game

#: part of a round -> the methods of the game, or of its defender, that are timed for it
PARTS: dict[str, tuple[str, ...]] = {
    "masks": ("propose",),
    "defender": ("defender.learn", "defender.step"),
    "evaluation": ("evaluate",),
    "generator": ("update_generator",),
    "settle": ("defender.settle",),
}
#: what is left of the round: the attacker's own updates, in which the masks act
REST = "attacker"


class Training:
    """The bench's training as AttendOut's `Problem`.

    Args:
        work: every update is made on its batch, and examples to evaluate are drawn from it.
    """

    def __init__(self, work: Workload) -> None:
        self.work = work

    def loss(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Outcome:
        """The loss of an update, or in evaluation of each example."""
        outputs = model(**{name: inputs[name] for name in self.work.inputs})
        if model.training:
            return Outcome(self.work.loss(outputs))
        return Outcome(self.work.example_losses(outputs, inputs["targets"]))

    def tokens(self, inputs: Mapping[str, Tensor]) -> dict[str, Tokens]:
        """Token ids and padding of each stack."""
        found = {stack: inputs[name] for stack, name in self.work.stacks.items()}
        return {stack: Tokens(ids, ids.ne(PADDING)) for stack, ids in found.items()}

    def validation(self, n: int) -> Iterable[dict[str, Tensor]]:
        """n examples of the batch, drawn at random, as one batch."""
        chosen = torch.randint(self.work.targets.size(0), (n,), device=self.work.targets.device)
        yield {name: tensor[chosen] for name, tensor in {**self.work.inputs, "targets": self.work.targets}.items()}


class BenchTraining:
    """The bench's training as a method's `Training`, as much of it as one step needs.

    Args:
        work: its batch is the training set.
    """

    clip_norm = 0.0
    folder = None
    vocabulary = ""

    def __init__(self, work: Workload) -> None:
        self.work, self.optimizer = work, work.optimizer

    def problem(self, subset: str) -> tuple[Training, int]:
        """See `Training`."""
        return Training(self.work), self.work.targets.size(0)


@contextmanager
def playing(
    row: Row, work: Workload, light: bool, clock: Callable[[], float]
) -> Iterator[Callable[[], dict[str, float]]]:
    """A step that plays one round and gives each part's seconds per update; generator and defender are made before.

    Args:
        row: with a method that is an `AttendOut`.
        work: what is trained.
        light: whether the row's memory options hold.
        clock: seconds.
    """
    options = {**row.options, **(row.memory_options if light else {})}
    regularizer = build(row.method, **options, problem=Training(work), optimizer=work.optimizer)
    with regularizer.attach(work.model):
        work.model.train()
        game = regularizer.start(work.model)
        players = (game.defender.model, game.defender.optimizer), (game.generator, game.generator_optimizer)
        work.players += players

        def step() -> dict[str, float]:
            with _timed(game, clock) as seconds:
                start = clock()
                for _ in range(regularizer.steps):
                    work.update(work.model(**work.inputs))
                    regularizer.end_update()
                whole = clock() - start
            seconds[REST] = whole - sum(seconds.values())
            return {part: took / regularizer.steps for part, took in seconds.items()}

        try:
            if light:  # the generator's optimizer state is made at the first round's end
                step()
            yield step
        finally:
            del work.players[-len(players) :]


@contextmanager
def _timed(game: Game, clock: Callable[[], float]) -> Iterator[dict[str, float]]:
    """While open, the seconds spent in each of PARTS are added up."""
    seconds, replaced = dict.fromkeys(PARTS, 0.0), []
    for part, names in PARTS.items():
        for name in names:
            owner = game.defender if name.startswith("defender.") else game
            method = name.removeprefix("defender.")
            setattr(owner, method, _adding(getattr(owner, method), part, seconds, clock))
            replaced.append((owner, method))
    try:
        yield seconds
    finally:
        for owner, method in replaced:
            delattr(owner, method)


def _adding(
    function: Callable[..., Any], part: str, seconds: dict[str, float], clock: Callable[[], float]
) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        result = function(*args, **kwargs)
        seconds[part] += clock() - start
        return result

    return timed
