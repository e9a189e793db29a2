"""AttendOut's signs: who is rewarded, drawn and copied; against values worked out by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves

from attn_reg_plugin.regularizers import Outcome
from attn_reg_plugin.regularizers.attend_out.game import Game
from tests.regularizers.attend_out.playing import Classification, begin, play
from tests.regularizers.trainings import equal

#: losses and metrics of three examples: the attacker is better, much better, and a little worse
LOSSES = {"attacker": [0.5, 2.0, 1.0], "defender": [1.0, 4.0, 0.75]}
METRICS = {"attacker": [1.0, 0.0, 0.5], "defender": [0.0, 0.5, 0.5]}
REWARDS = {"loss": [0.5, 2.0, -0.25], "sign": [1.0, 1.0, -1.0], "metric": [1.0, -0.5, 0.0]}


class Known(Classification):
    """In evaluation mode, where no dropout is, each player has the losses and metrics above."""

    def __init__(self, attacker):
        self.attacker = attacker

    def loss(self, model, inputs):
        if model.training:
            return super().loss(model, inputs)
        player = "attacker" if model is self.attacker else "defender"
        return Outcome(torch.tensor(LOSSES[player][inputs]), torch.tensor(METRICS[player][inputs]))

    def validation(self, n):
        return range(n)


def started(**options):
    """The game of a new model, in an attached regularizer, after two updates of three."""
    model, optimizer, regularizer = begin(**options)
    regularizer.problem = Known(model)
    regularizer.attach(model)
    play(model, optimizer, regularizer, range(2))
    return regularizer.game


def test_the_winner_is_drawn_in_favour_of_the_better():
    """σ(score difference / winner_temperature), to within four standard deviations."""
    game, draws = started(winner_temperature=0.5), 400
    torch.manual_seed(0)
    for difference, probability in ((1.0, 0.8808), (0.5, 0.7311), (0.0, 0.5), (-0.5, 0.2689), (-1.0, 0.1192)):
        scores = torch.tensor([difference - 2.0, -2.0])
        won = sum(game.attacker_wins(scores) for _ in range(draws))
        assert won / draws == pytest.approx(probability, abs=4 * (probability * (1 - probability) / draws) ** 0.5)
    game = started()  # by default a clearly better player wins
    for scores, wins in (([1.0, 0.0], True), ([0.0, 1.0], False)):
        assert {game.attacker_wins(torch.tensor(scores)) for _ in range(20)} == {wins}


@pytest.mark.parametrize("reward", REWARDS)
def test_a_reward_is_how_much_better_the_attacker_is(reward, monkeypatch):
    """Example by example, in evaluation mode; of the losses less is better, of the metric more."""
    seen, game = {}, started(reward=reward)
    monkeypatch.setattr(game, "update_generator", lambda advantages: seen.update(advantages=advantages) or 0.0)
    game.end_round()
    assert seen["advantages"].tolist() == pytest.approx(REWARDS[reward]), "the first baseline is 0"
    assert game.last_round["reward"] == pytest.approx(sum(REWARDS[reward]) / 3)
    scores = METRICS if reward == "metric" else {player: [-loss for loss in LOSSES[player]] for player in LOSSES}
    for player in ("attacker", "defender"):
        assert game.last_round[f"{player}_score"] == pytest.approx(sum(scores[player]) / 3)
    assert game.defender.attacker.training and game.defender.model.training


def test_leave_one_out_compares_with_the_rounds_other_rewards():
    game = started(baseline="leave_one_out")
    found = game.advantages(torch.tensor([1.0, 0.0, -4.0]))
    assert found.tolist() == pytest.approx([1 - (0 - 4) / 2, 0 - (1 - 4) / 2, -4 - (1 + 0) / 2])


@pytest.mark.parametrize("attacker_won", [True, False])
def test_the_loser_has_the_winners_weights_and_optimizer_state(attacker_won):
    """Of its own: learning rates stay whose they are, and later steps of one leave the other's state alone."""
    defender = started().defender
    players = (defender.attacker, defender.attacker_optimizer), (defender.model, defender.optimizer)
    (winner, winning), (loser, losing) = players if attacker_won else players[::-1]
    winning.param_groups[0]["lr"], losing.param_groups[0]["lr"] = 0.25, 0.5
    kept = copy.deepcopy((list(winner.parameters()), states_of(winning)))
    assert not all(ours.equal(theirs) for ours, theirs in zip(loser.parameters(), kept[0], strict=True))
    assert not equal(states_of(losing), kept[1])
    defender.settle(attacker_won)
    for model, optimizer in ((winner, winning), (loser, losing)):
        assert all(ours.equal(theirs) for ours, theirs in zip(model.parameters(), kept[0], strict=True))
        assert kept[1] and equal(states_of(optimizer), kept[1])
    assert (winning.param_groups[0]["lr"], losing.param_groups[0]["lr"]) == (0.25, 0.5)
    for state in losing.state.values():
        state["exp_avg"].add_(1.0)
    assert equal(states_of(winning), kept[1])


def states_of(optimizer):
    """What Adam keeps of each parameter, in their order."""
    return tree_leaves(optimizer.state_dict()["state"])


def test_the_generators_gradient_is_clipped():
    """What is logged is the norm before."""
    norms = []

    class Watched(Game):
        def update_generator(self, advantages):
            logged = super().update_generator(advantages)
            gradients = [p.grad.norm() for p in self.generator.parameters() if p.grad is not None]
            norms.append((float(torch.stack(gradients).norm()), logged))
            return logged

    for limit in (0.0, 1e-4):
        model, optimizer, regularizer = begin(generator_clip_norm=limit)
        regularizer.game_class, regularizer.problem = Watched, Known(model)
        with regularizer.attach(model):
            play(model, optimizer, regularizer, range(3))
    (whole, logged), (clipped, before) = norms
    assert whole == pytest.approx(logged) and logged == pytest.approx(before)
    assert logged > 1e-3 and clipped == pytest.approx(1e-4, rel=1e-2)
