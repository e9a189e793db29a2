"""AttendOut's game: generator, attacker and defender from the first forward on, round by round.

A round is T updates of both players on the same batches. Then both are evaluated, the generator ascends the policy
gradient of equation 5 (Wu, Zhao & Zhang, arXiv 2104.04692), and one of the players is copied over the other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from attn_reg_plugin.attention.masks import pack_bits, unpack_bits
from attn_reg_plugin.regularizers.attend_out.defender import Defender
from attn_reg_plugin.regularizers.attend_out.generator import (
    Generator,
    PolicyGradient,
    Tokens,
    policy_gradient,
    sample_masks,
)
from attn_reg_plugin.regularizers.base.context import Problem
from attn_reg_plugin.regularizers.base.distributed import (
    average,
    average_gradients,
    from_first_rank,
    gathered_on_first_rank,
    rank,
    world_size,
)
from attn_reg_plugin.regularizers.base.hooks.forward import own_copy
from attn_reg_plugin.regularizers.base.hooks.put_back import in_evaluation

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.attend_out import AttendOut

logger = logging.getLogger(__name__)
OPTIMIZERS: dict[str, type[Optimizer]] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
#: of a round's gradients that are kept from drawing to learning; what is beyond it is worked through again
KEPT_BYTES = 2**28


@dataclass
class CachedBatch:
    """One forward of the attacker: its tokens, and the packed masks that were drawn for it.

    Attributes:
        update: which update of the round it belonged to, from 0.
        tokens: by stack.
        masks: packed bits by site, with the shapes to unpack them to.
        gradient: of its objective, where it was kept; no state has it.
    """

    update: int
    tokens: dict[str, Tokens]
    masks: dict[str, tuple[Tensor, tuple[int, ...]]]
    gradient: PolicyGradient | None = None

    def unpacked(self) -> dict[str, Tensor]:
        """Return the keep masks by site, bool (B, T, S)."""
        masks = self.masks.items()
        return {name: unpack_bits(bits, math.prod(shape)).view(shape) for name, (bits, shape) in masks}

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors, on the CPU; `rank` is the process that keeps the batch."""
        return {
            "rank": rank(),
            "update": self.update,
            "tokens": {k: tuple(tensor.cpu() for tensor in v) for k, v in self.tokens.items()},
            "masks": {k: (packed.cpu(), shape) for k, (packed, shape) in self.masks.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device) -> CachedBatch:
        """The batch that `state_dict` described, on `device`."""
        tokens = {k: Tokens(*(tensor.to(device) for tensor in v)) for k, v in state["tokens"].items()}
        masks = {k: (packed.to(device), tuple(shape)) for k, (packed, shape) in state["masks"].items()}
        return cls(state["update"], tokens, masks)


class Game:
    """One game, made when it starts and dropped when it ends.

    Args:
        method: whose options hold.
        problem: how the players are trained and evaluated.
        generator, defender: G-Net, and D-Net, which knows the attacker.

    Attributes:
        rounds, in_round: finished rounds, and updates of the present one.
        cache: batches and masks of the present round's finished updates on this rank.
        cache_elsewhere: those of the other ranks, kept by rank 0, which saves the state.
        moving_baseline, moving_square: moving averages of the rewards and of the squared advantages.
        last_round: what the last round came to.
    """

    def __init__(self, method: AttendOut, problem: Problem, generator: Generator, defender: Defender) -> None:
        self.method, self.problem, self.generator, self.defender = method, problem, generator, defender
        self.generator_optimizer = OPTIMIZERS[method.generator_optimizer](generator.parameters(), method.generator_lr)
        self.rounds, self.in_round = 0, 0
        self.cache: list[CachedBatch] = []
        self.cache_elsewhere: list[dict[str, Any]] = []
        self.moving_baseline, self.moving_square = 0.0, 0.0
        self.last_round: dict[str, float] = {}
        self._pending: list[tuple[Mapping[str, Any], CachedBatch | None]] = []
        self._said_not_finite = False
        for parameter in generator.parameters():
            from_first_rank(parameter.data)

    # -- an update --------------------------------------------------------------------------------------------------

    def propose(self, inputs: Mapping[str, Any], counts: bool) -> tuple[Mapping[str, Tensor], dict[str, Tokens]]:
        """Draw the attacker's masks for a batch, and keep both for the end of the update and of the round.

        Args:
            inputs: of the forward.
            counts: whether the batch counts in the loss.

        Returns:
            keep masks by site name, bool (B, T, S), and the tokens by stack that they were drawn for.
        """
        tokens = self.problem.tokens(inputs)
        given = tokens if isinstance(tokens, Mapping) else {}
        for stack in self.generator.stacks:
            if not isinstance(given.get(stack), Tokens) or given[stack].valid.dtype != torch.bool:
                raise ValueError(
                    f"the problem's tokens(inputs) must give {{{stack!r}: Tokens(ids, valid)}}, valid of bool, but "
                    f"gave {tokens!r:.200}"
                )
        tokens = {stack: given[stack] for stack in self.generator.stacks}
        masks, gradient = self._drawn(tokens, counts)
        batch = None
        if counts:
            packed = {}
            for shape in {tuple(mask.shape) for mask in masks.values()}:
                alike = {name: mask.reshape(-1) for name, mask in masks.items() if mask.shape == shape}
                bits = pack_bits(torch.stack(list(alike.values())))
                packed.update((name, (one, shape)) for name, one in zip(alike, bits.unbind(), strict=True))
            batch = CachedBatch(self.in_round, tokens, packed, gradient)
        self._pending.append((own_copy(inputs), batch))  # the attacker's forward may change its arguments
        return masks, tokens

    def _drawn(self, tokens: dict[str, Tokens], counts: bool) -> tuple[Mapping[str, Tensor], PolicyGradient | None]:
        """Masks, and the gradient of the pass that they are drawn from, as long as there is room for it.

        Shared tables change with the model before the round ends, and a training that goes on in the middle of a round
        could not take the gradient again: there it is taken at the end.
        """
        batches = [*self.cache, *(batch for _, batch in self._pending)]
        held = sum(batch.gradient.bytes for batch in batches if batch is not None and batch.gradient is not None)
        wanted = counts and not self.generator.shared
        if wanted and held + PolicyGradient.bytes_of(self.generator, tokens) <= KEPT_BYTES:
            return policy_gradient(self.generator, tokens, self.method.temperature)
        with torch.no_grad():
            return sample_masks(self.generator(tokens), self.method.temperature), None

    def end_update(self) -> dict[str, float]:
        """Make the defender's step on the batches of this update; see `end_round`, which may be due."""
        if not self._pending:
            return {}
        pending, self._pending = self._pending, []
        for inputs, _ in pending:
            self.defender.learn(self.problem, inputs)
        self.defender.step()
        batches = [batch for _, batch in pending if batch is not None]
        self.cache += batches
        self.cache_elsewhere += gathered_on_first_rank(batch.state_dict() for batch in batches)
        self.in_round += 1
        return self.end_round() if self.in_round == self.method.steps else {}

    def forget_unfinished(self) -> None:
        """Forget the forwards since the last update: the optimizer's step was skipped, as on an overflow."""
        self._pending = []

    def forget_last(self) -> None:
        """Forget the last forward: an exception ended it."""
        del self._pending[-1]

    # -- a round ----------------------------------------------------------------------------------------------------

    def end_round(self) -> dict[str, float]:
        """Evaluate both, reward the generator, settle who won; equal weights again.

        Returns:
            What the round came to if the generator learnt from it, else nothing.
        """
        attacker, defender = self.evaluate()
        rewards = average((attacker - defender).sign() if self.method.reward == "sign" else attacker - defender)
        finite = bool(rewards.isfinite().all())  # of all ranks, so that each takes the same branch
        gradient_norm = self.update_generator(self.advantages(rewards)) if finite else 0.0
        learnt = finite and math.isfinite(gradient_norm)
        scores = average(torch.stack([attacker.mean(), defender.mean()]))
        won = self.attacker_wins(scores)
        self.defender.settle(won)
        self.rounds, self.in_round, self.cache, self.cache_elsewhere = self.rounds + 1, 0, [], []
        self.last_round = {
            "attacker_score": float(scores[0]),
            "defender_score": float(scores[1]),
            "reward": float(rewards.mean()),
            "baseline": self.moving_baseline,
            "generator_gnorm": gradient_norm,
            "attacker_won": float(won),
        }
        if not finite:
            logger.warning(
                f"{self.method.name}: a loss of round {self.rounds} is not finite: nothing is learnt from it"
            )
        elif not learnt and not self._said_not_finite:
            self._said_not_finite = True
            logger.warning(
                f"{self.method.name}: the generator's gradient or weights are not finite in round {self.rounds}: "
                "nothing is learnt from this or any such round, and where its scores are NaN all attention is kept; a "
                "smaller generator_lr may help (reported once)"
            )
        return self.last_round if learnt else {}

    def evaluate(self) -> tuple[Tensor, Tensor]:
        """Scores of attacker and defender, higher is better, one per example: minus the loss, or the metric."""
        examples = list(self.problem.validation(self.method.reward_examples or self.method.steps))
        if not examples:
            raise ValueError("the problem's validation gave no examples to reward the generator by")
        return self._scores(self.defender.attacker, examples), self._scores(self.defender.model, examples)

    def _scores(self, model: nn.Module, examples: list[Any]) -> Tensor:
        with in_evaluation(model), torch.no_grad():
            outcomes = [self.problem.loss(model, inputs) for inputs in examples]
        if self.method.reward == "metric":
            if any(outcome.metric is None for outcome in outcomes):
                raise ValueError("reward='metric', but the problem's outcomes have no metric; use reward='loss'")
            return torch.cat([outcome.metric.float().reshape(-1) for outcome in outcomes])
        return -torch.cat([outcome.loss.float().reshape(-1) for outcome in outcomes])

    def advantages(self, rewards: Tensor) -> Tensor:
        """r_t - b for each update of the round, (T,), from one reward per example; the moving averages move on."""
        if self.method.credit == "example" and rewards.numel() != self.method.steps:
            raise ValueError(
                f"the problem's validation gave {rewards.numel()} examples for a round of {self.method.steps} updates; "
                "credit='example' needs one for each, credit='round' takes any number"
            )
        mean, momentum = rewards.mean(), self.method.baseline_momentum
        if self.method.baseline == "leave_one_out":
            centred = rewards - (rewards.sum() - rewards) / (self.method.steps - 1)
        else:
            credited = mean.expand(self.method.steps) if self.method.credit == "round" else rewards
            centred = credited - self.moving_baseline
        self.moving_baseline = momentum * self.moving_baseline + (1 - momentum) * float(mean)
        square = float(centred.square().mean())
        momentum = momentum if self.moving_square > 0 else 0.0  # the first round that counts does so in full
        self.moving_square = momentum * self.moving_square + (1 - momentum) * square
        return centred / max(self.moving_square, 1e-16) ** 0.5 if self.method.normalize else centred

    def update_generator(self, advantages: Tensor) -> float:
        """One ascent step on (1/m) Σ of the cached batches' objectives; returns the gradient's norm.

        m counts the mask sequences that were sampled, of T masks each, so the T steps add up: it is the number of
        examples per update, of all ranks and their mean over the round, since shares may be unequal.

        A gradient that is not finite changes nothing; a generator with a weight that is not finite has no other.
        """
        masks = sum(next(iter(batch.masks.values()))[1][0] for batch in self.cache)
        sequences = float(average(torch.tensor(float(masks), device=advantages.device))) / self.method.steps
        self.generator_optimizer.zero_grad(set_to_none=True)
        for batch in self.cache:
            gradient = batch.gradient
            if gradient is None:
                _, gradient = policy_gradient(self.generator, batch.tokens, self.method.temperature, batch.unpacked())
            gradient.descend(self.generator, batch.tokens, -advantages[batch.update] / sequences)
        average_gradients(self.generator)
        limit = self.method.generator_clip_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(self.generator.parameters(), limit))
        if math.isfinite(norm):
            self.generator_optimizer.step()
        return norm

    def attacker_wins(self, scores: Tensor) -> bool:
        """Whether the attacker is kept, given the mean scores (attacker, defender); equal on every rank.

        A player whose score is not finite loses.
        """
        if not bool(scores.isfinite().all()):
            return bool(scores[0].isfinite())
        if self.method.winner == "attacker":
            return True
        difference = scores[0] - scores[1]
        if self.method.winner == "best":
            return bool(difference > 0)
        draw = from_first_rank(torch.rand((), device=scores.device))
        return bool(draw < torch.sigmoid(difference / self.method.winner_temperature))

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact continuation needs; of several ranks, rank 0's state is whole."""
        return {
            "rounds": self.rounds,
            "in_round": self.in_round,
            "moving_baseline": self.moving_baseline,
            "moving_square": self.moving_square,
            "generator": self.generator.state_dict(),
            "generator_optimizer": self.generator_optimizer.state_dict(),
            "defender": self.defender.state_dict(),
            "cache": [batch.state_dict() for batch in self.cache] + self.cache_elsewhere,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        device = next(self.generator.parameters()).device
        self.rounds, self.in_round = state["rounds"], state["in_round"]
        self.moving_baseline, self.moving_square = state["moving_baseline"], state["moving_square"]
        self.generator.load_state_dict(state["generator"])
        self.generator_optimizer.load_state_dict(state["generator_optimizer"])
        self.defender.load_state_dict(state["defender"])
        if self.in_round >= self.method.steps:
            logger.warning(
                f"{self.method.name}: the state is {self.in_round} updates into a round of now {self.method.steps}; "
                "it begins anew"
            )
            self.defender.settle(attacker_won=True)
            self.in_round = 0
            return
        mine = [batch for batch in state["cache"] if batch["rank"] % world_size() == rank()]
        self.cache = [CachedBatch.from_state_dict(batch, device) for batch in mine]
        self.cache_elsewhere = [b for b in state["cache"] if b["rank"] % world_size()] if rank() == 0 else []
