"""AttendOut (Wu, Zhao & Zhang, "Not All Attention Is All You Need", arXiv 2104.04692).

Two copies of the model are trained side by side on the same batches: the attacker (A-Net) with the attention masks
that a generator (G-Net) proposes, the defender (D-Net) with its regular dropout only. A round is T updates; then both
are evaluated on examples of a validation set, the generator is rewarded by policy gradient (equation 5) where the
attacker does better, and one of the two, drawn with a probability that favours the better, is copied over the other.

As published, one validation example rewards one update; `credit="round"` with many `reward_examples` and small `steps`
is offered as a less noisy estimator.

`game.py` plays the rounds, `generator.py` is G-Net and `defender.py` D-Net.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from attn_reg_plugin.attention.graphs import uncompiled
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers.attend_out.defender import Defender, check_copyable
from attn_reg_plugin.regularizers.attend_out.game import Game
from attn_reg_plugin.regularizers.attend_out.generator import Generator, embeddings_of, valid_pairs
from attn_reg_plugin.regularizers.base import Preset, Regularizer, option, register
from attn_reg_plugin.regularizers.base.context import Problem, Training
from attn_reg_plugin.regularizers.base.hooks.attachment import check_alone
from attn_reg_plugin.regularizers.base.hooks.forward import Forward
from attn_reg_plugin.regularizers.base.options import OptionError
from attn_reg_plugin.regularizers.base.statistics import Quantity

logger = logging.getLogger(__name__)

#: why a site that runs several times in a forward is refused
ONE_CALL = (
    "attend_out proposes one mask per site from the batch's tokens and can't tell which call it belongs to; leave this "
    "site out of sites=, or attach to the part that runs once"
)


@register("attend_out")
@dataclass(eq=False)
class AttendOut(Regularizer):
    """A generator learns which attention to drop from a duel between two copies of the model.

    Besides the options it needs to know the training: `problem` and `optimizer`, given here or set before the first
    forward. In any loop, `end_update()` after each optimizer step trains the defender and, every T updates, plays
    out the round. A batch that is to count for nothing, such as the empty share of a data-parallel process, is
    announced by `supply(counts=False)`.

    Attributes, beside those that their help explains:
        reward: r_t from the two losses on example t: their difference (`loss`), its sign (`sign`), or the
            difference of the problem's metric (`metric`).
        reward_examples: validation examples per round, 0 = T (the paper's).
        credit: `example` pairs r_t with update t (the paper's), `round` gives every update the mean reward: the
            examples' own noise averages out, and `reward_examples` can be as large as evaluation allows.
        baseline: `moving` average (the paper's), or `leave_one_out`: the mean of the round's other rewards.
        winner: `draw` with P(attacker) = σ(score difference / winner_temperature), `best`, or `attacker`.
        generator_width: of the queries, keys and values in the generator; 0 = as wide as the embeddings, the paper's
            form. A narrow one is cheaper, and another function.
        problem, optimizer: what to train and how; see `Problem`.
    """

    presets: ClassVar[tuple[Preset, ...]] = (Preset("attend_out", "AttendOut", {"sites": "encoder.self"}),)
    by_round: ClassVar[tuple[Quantity, ...]] = tuple(
        Quantity(key, mean_of="rounds")
        for key in ("attacker_score", "defender_score", "reward", "baseline", "generator_gnorm", "attacker_won")
    )
    game_class: ClassVar[type[Game]] = Game

    large_state: ClassVar[bool] = True
    one_forward: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset({"mask"})
    alone: ClassVar[str] = "it trains two copies of the model, of which the other would see one only"

    steps: int = option(8, "T, updates in a round, at least 1", within="[1, inf)")
    reward: str = option("loss", "reward of an example", choices=("loss", "sign", "metric"))
    reward_examples: int = option(0, "validation examples per round, drawn at random; 0 = T", within="[0, inf)")
    reward_subset: str = option("valid", "the data that rewards are measured on: valid, train, or a subset's name")
    credit: str = option("example", "which updates a reward belongs to", choices=("example", "round"))
    baseline: str = option("moving", "baseline of the policy gradient", choices=("moving", "leave_one_out"))
    baseline_momentum: float = option(0.9, "momentum of the moving-average baseline, in [0, 1)", within="[0, 1)")
    normalize: bool = option(False, "divide the advantages by their moving root mean square, so that their scale is 1")
    winner: str = option("draw", "which of the two is copied over the other", choices=("draw", "best", "attacker"))
    winner_temperature: float = option(0.01, "of the draw: smaller favours the better more, above 0", within="(0, inf)")
    temperature: float = option(1.0, "of the Gumbel noise, above 0", within="(0, inf)")
    embedding: str = option(
        "own", "the generator's embeddings: own, from the model's, or shared and frozen", choices=("own", "shared")
    )
    initial_keep: float = option(0.5, "P(keep) at a raw score of 0, in (0, 1); the paper's is 0.5", within="(0, 1)")
    generator_width: int = option(
        0, "width of the generator's queries, keys and values; 0 = the model's, as in the paper", within="[0, inf)"
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
        self.game: Game | None = None
        self._kept: Mapping[str, Any] = {}  # of a game that is not running: one that ended, or one to continue
        self._continues = False
        self._make_defender: Callable[[nn.Module, Optimizer, float], Defender] = Defender
        self._own: tuple[Problem | None, Optimizer | None, float] | None = None  # the user's, while it is bound

    def copied(self, memo: dict[int, Any]) -> AttendOut:
        """For a copy of the model, such as an average of its weights: without the game."""
        twin = super().copied(memo)
        twin.game, twin.problem, twin.optimizer = None, None, None
        return twin

    def begin_anew(self) -> None:
        """As `Regularizer.begin_anew`: the game of another model is over."""
        super().begin_anew()
        self._kept = {}

    def hooks(self, model: nn.Module, sites: list[AttentionSite]) -> list[Any]:
        """Refuse towers: the generator reads one text for each stack."""
        if towers := [site.name for site in sites if site.tower]:
            raise OptionError(
                "sites", f"{towers[0]} is in one of several towers, and attend_out reads one text; attach it to a tower"
            )
        return []

    def check_shards(self, modules: list[nn.Module]) -> None:
        """Refuse FSDP2, which copies no model."""
        raise ValueError(
            f"{self.name} cannot act on a model whose parameters are sharded by fully_shard: it trains a copy of the "
            "model beside it, and FSDP2 copies no model; use data parallel training, or another method such as ad_drop"
        )

    # -- the training -----------------------------------------------------------------------------------------------

    def bind(self, training: Training) -> None:
        """Take problem, optimizer and clipping from the training, where the user has not given them.

        Raises:
            ValueError: the model cannot be copied; or the reward data cannot be used, or has too few examples.
        """
        if self._attachment is not None:
            with self._attachment.suspended():
                check_copyable(self.model)
        self._own = self.problem, self.optimizer, self.clip_norm
        if self.problem is None:
            self.problem, size = training.problem(self.reward_subset)
            if self.credit == "example" and size < self.steps:
                raise ValueError(
                    f"credit='example' rewards each of the {self.steps} updates of a round by an example of its own, "
                    f"but {self.reward_subset!r} has {size}; use fewer steps, or credit='round'"
                )
        self.optimizer = self.optimizer or training.optimizer
        self.clip_norm = self.clip_norm or training.clip_norm
        self._make_defender = training.copy_of

    def unbind(self) -> None:
        """Release the training, and give back what is the user's; nothing happens if it is not bound."""
        if self._own is not None:
            self.problem, self.optimizer, self.clip_norm = self._own
            self._own, self._make_defender = None, Defender

    # -- an update --------------------------------------------------------------------------------------------------

    def before_forward(self, forward: Forward) -> None:
        """The attacker's masks for this batch, proposed by the generator and set on the sites."""
        masks, tokens = self.start(forward.model).propose(forward.inputs, forward.supplied.counts)
        alike: dict[tuple[str, str], list[AttentionSite]] = {}
        for site in self.attached_sites:
            site.ask(keep=masks[site.name].unsqueeze(1), once=ONE_CALL)
            alike.setdefault((site.stack, site.kind), []).append(site)
        for kind, sites in alike.items():
            pairs = valid_pairs(*kind, tokens)
            keep = torch.stack([masks[site.name] for site in sites]) & pairs
            self.count_dropped(sites, keep.flatten(0, 1), pairs)

    def after_forward(self, outputs: Any) -> None:
        """Neither player learns from a forward that an exception ended."""
        if outputs is None:
            self.game.forget_last()

    def end_update(self) -> None:
        """The defender's step on the batches of this update and, after T updates, the end of the round."""
        super().end_update()
        learnt = {} if self.game is None else self.game.end_update()
        if learnt:
            self.statistics.add("rounds", 1.0)
            for key, value in learnt.items():
                self.statistics.add(key, value)

    def forget_unfinished(self) -> None:
        """As `Regularizer.forget_unfinished`: the defender makes no step either."""
        if self.game is not None:
            self.game.forget_unfinished()

    # -- the game ---------------------------------------------------------------------------------------------------

    def start(self, model: nn.Module) -> Game:
        """The running game; it starts with generator and defender made anew, or as a loaded state has them.

        Raises:
            ValueError: `problem` or `optimizer` is missing, the attacker is not alone on the model, or that cannot be
                copied; a loaded state has other sites.
        """
        if self.game is not None:
            return self.game
        if self.problem is None or self.optimizer is None:
            raise ValueError("AttendOut needs to know the training: give it problem=... and optimizer=...")
        check_alone(self, model)  # parts may have been attached since
        cache = self._kept.get("cache", ()) if self._continues else ()
        known = {name for batch in cache for name in batch["masks"]}
        if others := known and known ^ {site.name for site in self.attached_sites}:
            raise ValueError(f"its sites are others: {', '.join(sorted(others))}")
        with torch.random.fork_rng([], enabled=self._continues):  # a continued game was built before
            generator = self.make_generator(model)
        with self._attachment.suspended():
            check_copyable(uncompiled(model))
            defender = self._make_defender(model, self.optimizer, self.clip_norm)
        self.game = self.game_class(self, self.problem, generator, defender)
        if self._continues:
            self.game.load_state_dict(self._kept)
        self._kept, self._continues = {}, False
        return self.game

    def make_generator(self, model: nn.Module) -> Generator:
        """The generator for the attached sites, on the model's device."""
        tables = embeddings_of(model, {site.stack for site in self.attached_sites}, self.attached_sites)
        shared, width = self.embedding == "shared", self.generator_width
        generator = Generator(self.attached_sites, tables, shared, self.initial_keep, width)
        generator.offset *= self.temperature  # masks are drawn at scores divided by it
        ours, theirs = (sum(p.numel() for p in module.parameters()) for module in (generator, model))
        logger.info(f"{self.name}: generator of {ours:,} parameters, {100 * ours / theirs:.1f} % of the model's")
        return generator.to(next(model.parameters()).device)

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact continuation needs; of several ranks, rank 0's state is whole."""
        if self.game is not None:
            return {**super().state_dict(), **self.game.state_dict()}
        return dict(self._kept) or {**super().state_dict(), "rounds": 0, "in_round": 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; the players are restored once they exist, at the first forward."""
        super().load_state_dict(state)
        self._end_game()
        self._continues = "generator" in state
        self._kept = state if self._continues else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue the game from a state, at once; a ValueError if it lacks a part of a game."""
        self.load_state_dict(state)
        if "generator" not in state and state.get("rounds") == state.get("in_round") == 0:
            return  # saved before the first update
        missing = [key for key in ("generator", "generator_optimizer", "defender", "cache") if key not in state]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        self.start(self.model)

    def detach(self) -> None:
        """Restore the model; `state_dict` keeps what the game came to, the next one begins anew or from a state."""
        self._continues = False  # a game that was to go on and never did is not the next one's
        try:
            if self.game is not None:
                self.game.forget_unfinished()
                # not the weights of two more models on the device
                self._kept = tree_map_only(Tensor, lambda one: one.detach().cpu(), self.state_dict())
        finally:
            self._end_game()
            super().detach()

    def _end_game(self) -> None:
        game, self.game = self.game, None
        if game is not None:
            game.defender.close()
