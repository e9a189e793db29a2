"""AttendOut (Wu, Zhao & Zhang, "Not All Attention Is All You Need", arXiv 2104.04692).

Two copies of the model are trained side by side on the same batches: the attacker (A-Net) with the attention masks
that a generator (G-Net) proposes, the defender (D-Net) with its regular dropout only. A round is T updates; then both
are evaluated on examples of a validation set, the generator is rewarded by policy gradient (equation 5) where the
attacker does better, and one of the two, drawn with a probability that favours the better, is copied over the other.

As published, one validation example rewards one update; `credit="round"` with many `reward_examples` and small `steps`
is offered as a less noisy estimator.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from attn_reg_plugin.regularizers.attachment import attachments_of
from attn_reg_plugin.regularizers.base import Problem, Regularizer, option, register
from attn_reg_plugin.regularizers.game import (
    CachedBatch,
    Defender,
    average,
    average_gradients,
    evaluating,
    from_first_rank,
    gathered_on_first_rank,
    on_cpu,
    rank,
    world_size,
)
from attn_reg_plugin.regularizers.generator import (
    Generator,
    embeddings_of,
    log_probability,
    sample_masks,
    valid_pairs,
)
from attn_reg_plugin.regularizers.probing import Forward, own_copy

logger = logging.getLogger(__name__)

#: why a site that runs several times in a forward is refused
ONE_CALL = (
    "attend_out proposes one mask a site from the batch's tokens and can't tell which call it belongs to; leave this "
    "site out of sites=, or attach to the part that runs once"
)


@register("attend_out")
@dataclass(eq=False)
class AttendOut(Regularizer):
    """A generator learns which attention to drop from a duel between two copies of the model.

    Besides the options it needs to know the training: `problem` and `optimizer`, given here or set before the first
    forward. In any loop, `end_update()` after each optimizer step trains the defender and, every T updates, plays
    out the round. A batch that is to count for nothing, such as the empty share of a data-parallel process, is
    announced by `supply(ignore_grad=True)`.

    Attributes:
        steps: T, updates a round.
        reward: r_t from the two losses on example t: their difference (`loss`), its sign (`sign`), or the
            difference of the problem's metric (`metric`).
        reward_examples: validation examples a round, 0 = T (the paper's).
        credit: `example` pairs r_t with update t (the paper's), `round` gives every update the mean reward: the
            examples' own noise averages out, and `reward_examples` can be as large as evaluation allows.
        baseline: `moving` average (the paper's), or `leave_one_out`: the mean of the round's other rewards.
        normalize: divide the advantages by a moving root mean square of theirs, so that their scale is 1.
        baseline_momentum: of the moving averages, in [0, 1).
        winner: `draw` with P(attacker) = σ(score difference / winner_temperature), `best`, or `attacker`.
        temperature: τ of the Gumbel noise.
        embedding: the generator's own, initialized from the model's, or `shared` and frozen.
        problem, optimizer: what to train and how; see `Problem`.

    Raises:
        TypeError: an option is of another type.
        ValueError: an option is out of its range.
    """

    by_round: ClassVar[tuple[str, ...]] = (
        "attacker_score",
        "defender_score",
        "reward",
        "baseline",
        "generator_gnorm",
        "attacker_won",
    )
    large_state: ClassVar[bool] = True
    defender_class: ClassVar[type[Defender]] = Defender

    steps: int = option(8, "T, updates in a round, at least 1", within="[1, inf)")
    reward: str = option("loss", "reward of an example", choices=("loss", "sign", "metric"))
    reward_examples: int = option(
        0, "validation examples a round, drawn at random; 0 = as many as updates", within="[0, inf)"
    )
    reward_subset: str = option("valid", "the data that rewards are measured on: valid, train, or a subset's name")
    credit: str = option("example", "which updates a reward belongs to", choices=("example", "round"))
    baseline: str = option("moving", "baseline of the policy gradient", choices=("moving", "leave_one_out"))
    baseline_momentum: float = option(0.9, "momentum of the moving-average baseline, in [0, 1)", within="[0, 1)")
    normalize: bool = option(False, "divide the advantages by a moving average of their size")
    winner: str = option("draw", "who is copied over the other", choices=("draw", "best", "attacker"))
    winner_temperature: float = option(0.01, "of the draw: smaller favours the better more, above 0", within="(0, inf)")
    temperature: float = option(1.0, "of the Gumbel noise, above 0", within="(0, inf)")
    embedding: str = option("own", "the generator's embeddings", choices=("own", "shared"))
    initial_keep: float = option(
        0.5, "P(keep) at a raw score of 0, in (0, 1); 0.5 is the paper's form", within="(0, 1)"
    )
    generator_lr: float = option(1e-3, "learning rate of the generator, above 0", within="(0, inf)")
    generator_optimizer: str = option("adam", "optimizer of the generator", choices=("adam", "sgd"))
    # the T steps of a round add up in the gradient: this is 1.0 a step of the default round
    generator_clip_norm: float = option(
        8.0, "largest norm of the generator's gradient, which grows with T; 0 = unlimited", within="[0, inf)"
    )
    clip_norm: float = option(
        0.0, "largest norm of the defender's gradient; 0 = unlimited (fairseq: --clip-norm)", within="[0, inf)"
    )
    problem: Problem | None = None
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        examples = self.reward_examples or self.steps
        if self.credit == "example" and examples != self.steps:
            raise ValueError(
                f"credit='example' pairs one example with each update: reward_examples must be 0 or {self.steps}, "
                f"not {self.reward_examples}; or use credit='round'"
            )
        if self.baseline == "leave_one_out" and (self.credit == "round" or self.steps == 1):
            raise ValueError(
                "baseline='leave_one_out' compares the rewards of a round: it needs credit='example' and steps of at "
                f"least 2, not credit={self.credit!r} and steps={self.steps}"
            )
        self._forget_game()

    def _forget_game(self) -> None:
        """No players, and no state to continue from."""
        self.generator: Generator | None = None
        self.generator_optimizer_: Optimizer | None = None
        self.defender: Defender | None = None
        self._state: Mapping[str, Any] | None = None  # to continue from
        self._ended: Mapping[str, Any] | None = None  # of the game before detach()
        self._reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> AttendOut:
        """The method on a copy of the model, such as an average of its weights: without the game or the training."""
        twin = memo[id(self)] = copy.copy(self)
        twin.problem = twin.optimizer = None
        twin._forget_game()
        vars(twin).update({name: copy.deepcopy(vars(self)[name], memo) for name in ("statistics", "_attachment")})
        twin._supplied = {}
        return twin

    def _reset(self) -> None:
        """A game that has not begun."""
        self.moving_baseline, self.moving_square, self.rounds, self.in_round = 0.0, 0.0, 0, 0
        self.cache: list[CachedBatch] = []
        self.cache_elsewhere: list[dict[str, Any]] = []  # of the other processes, known to the first one, which saves
        self.last_round: dict[str, float] = {}
        self.said_not_finite = False
        self._pending: list[Mapping[str, Any]] = []

    # -- an update --------------------------------------------------------------------------------------------------

    def before_forward(self, forward: Forward) -> None:
        """The attacker's masks for this batch: proposed, set on the sites, and cached with the tokens."""
        self.start(forward.model)
        tokens = self.problem.tokens(forward.inputs)
        tokens = {stack: tokens[stack] for stack in self.generator.stacks}
        with torch.no_grad():
            masks = sample_masks(self.generator(tokens), self.temperature)
        for site in self.attached_sites:
            pairs = valid_pairs(site.stack, site.kind, tokens)
            site.keep, site.once = masks[site.name].unsqueeze(1), ONE_CALL
            self.count_dropped(site, masks[site.name] & pairs, pairs)
        self._pending.append(own_copy(forward.inputs))  # the attacker's forward may change its arguments
        if not forward.supplied.get("ignore_grad", False):
            self.cache.append(CachedBatch.of(self.in_round, tokens, masks))

    def start(self, model: nn.Module) -> None:
        """Build generator and defender, once; continue from a loaded state if there is one.

        Raises:
            ValueError: `problem` or `optimizer` is missing.
        """
        if self.defender is not None:
            return
        if self.problem is None or self.optimizer is None:
            raise ValueError("AttendOut needs to know the training: give it problem=... and optimizer=...")
        others = {each.regularizer.name for each in attachments_of(model)} - {self.name}
        if others:
            raise ValueError(f"AttendOut copies its model, so it must be alone on it; detach {', '.join(others)} first")
        with torch.random.fork_rng([], enabled=self._state is not None):  # a continued game was built before
            self.generator = self.make_generator(model)
        kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        self.generator_optimizer_ = kinds[self.generator_optimizer](self.generator.parameters(), self.generator_lr)
        with self._attachment.suspended():
            self.defender = self.make_defender(model)
        for parameter in self.generator.parameters():
            from_first_rank(parameter.data)
        self._log_size(model)
        self._reset()
        if self._state is not None:
            self._restore(self._state)
        self._state = self._ended = None

    def _log_size(self, model: nn.Module) -> None:
        """The generator's size beside the model's; shared embeddings are the model's."""
        ours, theirs = (sum(p.numel() for p in module.parameters()) for module in (self.generator, model))
        logger.info(f"{self.name}: generator of {ours:,} parameters, {100 * ours / theirs:.1f} % of the model's")

    def make_generator(self, model: nn.Module) -> Generator:
        """The generator for the attached sites, on the model's device."""
        tables = embeddings_of(model, {site.stack for site in self.attached_sites}, self.attached_sites)
        generator = Generator(self.attached_sites, tables, self.embedding == "shared", self.initial_keep)
        return generator.to(next(model.parameters()).device)

    def make_defender(self, model: nn.Module) -> Defender:
        """The defender, equal to the attacker."""
        return self.defender_class(model, self.optimizer, self.clip_norm)

    def end_update(self) -> None:
        """The defender's step on the batches of this update and, after T updates, the end of the round."""
        super().end_update()
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        for inputs in pending:
            self.defender.learn(self.problem, inputs)
        self.defender.step()
        self.cache_elsewhere += gathered_on_first_rank(self._cache_of(self.in_round))
        self.in_round += 1
        if self.in_round == self.steps:
            self.end_round()

    def forget_unfinished(self) -> None:
        """Forget the forwards since the last update: the optimizer's step was skipped, as on an overflow."""
        self._pending = []
        self.cache = [batch for batch in self.cache if batch.update < self.in_round]

    def _cache_of(self, update: int) -> list[dict[str, Any]]:
        return [batch.state_dict() for batch in self.cache if batch.update == update] if world_size() > 1 else []

    # -- a round ----------------------------------------------------------------------------------------------------

    def end_round(self) -> None:
        """Evaluate both, reward the generator, settle who won; equal weights again."""
        attacker, defender = self.evaluate()
        rewards = average((attacker - defender).sign() if self.reward == "sign" else attacker - defender)
        finite = bool(rewards.isfinite().all())  # of all processes, so that each takes the same branch
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
            logger.warning(f"{self.name}: a loss of round {self.rounds} is not finite: nothing is learnt from it")
        elif not learnt and not self.said_not_finite:
            self.said_not_finite = True
            logger.warning(
                f"{self.name}: the generator's gradient or weights are not finite in round {self.rounds}: nothing is "
                "learnt from this or any such round, and where its scores are NaN all attention is kept; a smaller "
                "generator_lr may help (said once)"
            )
        if not learnt:
            return
        self.statistics.add("rounds", 1.0)
        for key, value in self.last_round.items():
            self.statistics.add(key, value)

    def evaluate(self) -> tuple[Tensor, Tensor]:
        """Scores of attacker and defender, higher is better, one an example: minus the loss, or the metric."""
        examples = list(self.problem.validation(self.reward_examples or self.steps))
        return self._scores(self.defender.attacker, examples), self._scores(self.defender.model, examples)

    def _scores(self, model: nn.Module, examples: list[Any]) -> Tensor:
        with evaluating(model):
            outcomes = [self.problem.loss(model, inputs) for inputs in examples]
        if self.reward == "metric":
            if any(outcome.metric is None for outcome in outcomes):
                raise ValueError("reward='metric', but the problem's outcomes have no metric; use reward='loss'")
            return torch.cat([outcome.metric.float().reshape(-1) for outcome in outcomes])
        return -torch.cat([outcome.loss.float().reshape(-1) for outcome in outcomes])

    def advantages(self, rewards: Tensor) -> Tensor:
        """r_t - b for each update of the round, (T,), from one reward an example; the moving averages move on.

        Raises:
            ValueError: credit='example', and there are not T examples.
        """
        if self.credit == "example" and rewards.numel() != self.steps:
            raise ValueError(
                f"the problem's validation gave {rewards.numel()} examples for a round of {self.steps} updates; "
                "credit='example' needs one for each, credit='round' takes any number"
            )
        mean, momentum = rewards.mean(), self.baseline_momentum
        if self.baseline == "leave_one_out":
            centred = rewards - (rewards.sum() - rewards) / (self.steps - 1)
        else:
            credited = mean.expand(self.steps) if self.credit == "round" else rewards
            centred = credited - self.moving_baseline
        self.moving_baseline = momentum * self.moving_baseline + (1 - momentum) * float(mean)
        square = float(centred.square().mean())
        self.moving_square = square if self.rounds == 0 else momentum * self.moving_square + (1 - momentum) * square
        return centred / max(self.moving_square, 1e-16) ** 0.5 if self.normalize else centred

    def policy_objective(self, batch: CachedBatch, advantage: Tensor) -> Tensor:
        """Equation 5 for one cached batch: Σ over its examples of (1/(n l²)) Σ log P(d) · (r_t - b).

        n l² counts the positions of an example's masks over all layers; only valid ones exist.
        """
        logits, total, count = self.generator(batch.tokens), 0.0, 0.0
        for name, stack, kind, _ in self.generator.sites:
            pairs = valid_pairs(stack, kind, batch.tokens)
            log_p = log_probability(logits[name], batch.mask(name), self.temperature)
            total = total + (log_p * pairs).sum((1, 2))
            count = count + pairs.sum((1, 2))
        return (total / count.clamp(min=1)).sum() * advantage

    def update_generator(self, advantages: Tensor) -> float:
        """One ascent step on (1/m) Σ of the cached batches' objectives; returns the gradient's norm.

        m counts the mask sequences that were sampled, of T masks each, so the T steps add up: it is the number of
        examples an update, of all processes and their mean over the round, since shares may be unequal.

        A gradient that is not finite changes nothing; a generator with a weight that is not finite has no other.
        """
        masks = sum(next(iter(batch.masks.values()))[1][0] for batch in self.cache)
        sequences = float(average(torch.tensor(float(masks), device=advantages.device))) / self.steps
        self.generator_optimizer_.zero_grad(set_to_none=True)
        for batch in self.cache:
            (-self.policy_objective(batch, advantages[batch.update]) / sequences).backward()
        average_gradients(self.generator)
        limit = self.generator_clip_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(self.generator.parameters(), limit))
        if math.isfinite(norm):
            self.generator_optimizer_.step()
        return norm

    def attacker_wins(self, scores: Tensor) -> bool:
        """Whether the attacker is kept, given the mean scores (attacker, defender); equal on every process.

        A player whose score is not finite loses.
        """
        if not bool(scores.isfinite().all()):
            return bool(scores[0].isfinite())
        if self.winner == "attacker":
            return True
        difference = scores[0] - scores[1]
        if self.winner == "best":
            return bool(difference > 0)
        draw = from_first_rank(torch.rand((), device=scores.device))
        return bool(draw < torch.sigmoid(difference / self.winner_temperature))

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact continuation needs; of several processes, the first one's state is whole."""
        state = {**super().state_dict(), "rounds": self.rounds, "in_round": self.in_round}
        if self.defender is None:
            return dict(self._state or self._ended or state)
        return {
            **state,
            "moving_baseline": self.moving_baseline,
            "moving_square": self.moving_square,
            "generator": self.generator.state_dict(),
            "generator_optimizer": self.generator_optimizer_.state_dict(),
            "defender": self.defender.state_dict(),
            "cache": [b.state_dict() for b in self.cache if b.update < self.in_round] + self.cache_elsewhere,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; the players are restored once they exist, at the first forward."""
        super().load_state_dict(state)
        if self.defender is None:
            self._state = state if "generator" in state else None
        else:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        device = next(self.generator.parameters()).device
        self.rounds, self.in_round = state["rounds"], state["in_round"]
        self.moving_baseline, self.moving_square = state["moving_baseline"], state["moving_square"]
        self.generator.load_state_dict(state["generator"])
        self.generator_optimizer_.load_state_dict(state["generator_optimizer"])
        self.defender.load_state_dict(state["defender"])
        if self.in_round >= self.steps:
            logger.warning(
                f"{self.name}: the state is {self.in_round} updates into a round of now {self.steps}; it begins anew"
            )
            self.defender.settle(attacker_won=True)
            self.in_round = 0
            return
        mine = [batch for batch in state["cache"] if batch["rank"] % world_size() == rank()]
        self.cache = [CachedBatch.from_state_dict(batch, device) for batch in mine]
        self.cache_elsewhere = [b for b in state["cache"] if b["rank"] % world_size()] if rank() == 0 else []

    def detach(self) -> None:
        """Restore the model; `state_dict` keeps what the game came to, the next one begins anew or from a state."""
        if self.defender is not None:
            try:
                self.forget_unfinished()
                self._ended = on_cpu(self.state_dict())  # not the weights of two more models on the device
            finally:
                self._end()
        elif self._state is not None:  # a game that was to go on and never did is not the next one's
            self._ended, self._state = self._state, None
        super().detach()

    def _end(self) -> None:
        """Let go of the players."""
        self.defender.close()
        super().detach()
        self.generator = self.defender = self.generator_optimizer_ = None
        self.cache, self.cache_elsewhere = [], []
