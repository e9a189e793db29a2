"""AttendOut's game: who is rewarded, drawn and copied, by hand; what counts for nothing, and what surrounds it."""

import copy
import logging
import math

import pytest
import torch
from torch.utils._pytree import tree_leaves

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import Outcome
from attn_reg_plugin.regularizers.attend_out.game import Game
from attn_reg_plugin.regularizers.base.hooks.attachment import attachments_of
from tests.regularizers.attend_out.playing import BATCHES, Classification, begin, play, same, update
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


class Merged(torch.nn.Module):
    """As an adapter that is merged into its layer in evaluation mode."""

    def train(self, mode=True):
        self.unmerged = mode
        return super().train(mode)


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
    game.defender.model.add_module("merged", merged := Merged())
    monkeypatch.setattr(game, "update_generator", lambda advantages: seen.update(advantages=advantages) or 0.0)
    game.end_round()
    assert seen["advantages"].tolist() == pytest.approx(REWARDS[reward]), "the first baseline is 0"
    assert game.last_round["reward"] == pytest.approx(sum(REWARDS[reward]) / 3)
    scores = METRICS if reward == "metric" else {player: [-loss for loss in LOSSES[player]] for player in LOSSES}
    for player in ("attacker", "defender"):
        assert game.last_round[f"{player}_score"] == pytest.approx(sum(scores[player]) / 3)
    assert game.defender.attacker.training and game.defender.model.training and merged.unmerged


def test_leave_one_out_compares_with_the_rounds_other_rewards():
    game = started(baseline="leave_one_out")
    found = game.advantages(torch.tensor([1.0, 0.0, -4.0]))
    assert found.tolist() == pytest.approx([1 - (0 - 4) / 2, 0 - (1 - 4) / 2, -4 - (1 + 0) / 2])


@pytest.mark.parametrize("attacker_won", [True, False])
def test_the_loser_has_the_winners_weights_and_optimizer_state(attacker_won):
    """The loser gets copies: learning rates stay whose they are, and later steps leave the other's state alone."""
    defender = started().defender
    players = (defender.attacker, defender.attacker_optimizer), (defender.model, defender.optimizer)
    (winner, winning), (loser, losing) = players if attacker_won else players[::-1]
    for model in (winner, loser):
        model.register_buffer("wide", torch.ones(1).expand(5))  # which cannot be written to
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
    """Read what Adam keeps of each parameter, in their order."""
    return tree_leaves(optimizer.state_dict()["state"])


def test_the_generators_gradient_is_clipped():
    """The norm before clipping is logged."""
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


@pytest.mark.parametrize("embedding, width", [("own", 8), ("shared", 8), ("own", 2)])
def test_the_generators_size_is_logged_once(embedding, width, caplog):
    model, optimizer, regularizer = begin(embedding=embedding, generator_width=width % 8)
    caplog.set_level(logging.INFO, "attn_reg_plugin")
    with regularizer.attach(model):
        play(model, optimizer, regularizer, range(4))
        size = sum(parameter.numel() for parameter in regularizer.game.generator.parameters())
    share = 100 * size / sum(parameter.numel() for parameter in model.parameters())
    attention = 3 * (8 * width + width) + (width * 8 + 8) + 2 * 8  # Q, K, V, O and the norm
    assert size == attention + ((13 + 16) * 8 if embedding == "own" else 0)  # tokens and positions
    assert caplog.messages == [f"attend_out: generator of {size:,} parameters, {share:.1f} % of the model's"]


def test_an_update_that_was_skipped_and_a_forward_that_failed_leave_nothing():
    defenders = []
    for skips in ("", "update", "forward"):
        model, optimizer, regularizer = begin()
        with regularizer.attach(model):
            update(model, optimizer, regularizer, 0)
            if skips == "forward":
                with model.output.register_forward_hook(lambda *call: 1 / 0), pytest.raises(ZeroDivisionError):
                    model(*BATCHES[5])
            if skips == "update":
                model(*BATCHES[5])
                assert len(regularizer.game.cache) == len(regularizer.state_dict()["cache"]) == 1
                regularizer.forget_unfinished()
            update(model, optimizer, regularizer, 1)
            assert [batch.update for batch in regularizer.game.cache] == [0, 1]
            defenders.append(copy.deepcopy(regularizer.game.defender.model))
    assert same(*defenders[:2]) and same(*defenders[1:])


def test_a_state_from_before_the_game_begins_it_anew():
    model, optimizer, regularizer = begin()
    with regularizer.attach(model):
        early = regularizer.state_dict()
        play(model, optimizer, regularizer, range(4))
        regularizer.load_state_dict(early)
        update(model, optimizer, regularizer, 0)
        assert (regularizer.game.rounds, [batch.update for batch in regularizer.game.cache]) == (0, [0])


def test_a_copy_of_the_model_has_no_game():
    """As an average of the weights is made, while the model is attached."""
    model, optimizer, regularizer = begin()
    with regularizer.attach(model):
        update(model, optimizer, regularizer, 0)
        twin = copy.deepcopy(model)
        (attachment,) = attachments_of(twin)
        ours = attachment.regularizer
        assert ours is not regularizer and ours.attached_sites[0] is not regularizer.attached_sites[0]
        assert (ours.problem, ours.optimizer, ours.game) == (None, None, None)
        with torch.no_grad():
            assert torch.equal(twin.eval()(*BATCHES[1]), model.eval()(*BATCHES[1]))
        with pytest.raises(ValueError, match="needs to know the training"):
            twin.train()(*BATCHES[1])
        model.train()
        update(model, optimizer, regularizer, 1)
        assert regularizer.game.in_round == 2
        ours.detach()
        assert not twin._forward_pre_hooks


def test_a_round_that_has_become_too_short_begins_anew(caplog):
    model, optimizer, regularizer = begin()
    with regularizer.attach(model):
        play(model, optimizer, regularizer, range(2))
        state = regularizer.state_dict()
    other, other_optimizer, again = begin()
    again.steps = 2
    again.load_state_dict(state)
    with again.attach(other):
        update(other, other_optimizer, again, 2)
        assert again.game.in_round == 1 and [batch.update for batch in again.game.cache] == [0]
        assert "2 updates into a round of now 2; it begins anew" in caplog.text
        update(other, other_optimizer, again, 3)
        assert again.game.rounds == 1


@pytest.mark.parametrize("winner", ["draw", "best", "attacker"])
@pytest.mark.parametrize("broken", ["attacker", "defender"])
def test_a_loss_that_is_not_finite_teaches_nothing_and_loses(winner, broken, monkeypatch, caplog):
    model, optimizer, regularizer = begin(winner=winner, normalize=True)
    with regularizer.attach(model):
        play(model, optimizer, regularizer, range(2))
        game = regularizer.game
        before, fine = copy.deepcopy(game.generator), torch.zeros(3)
        monkeypatch.setattr(game, "evaluate", lambda: (fine * math.nan, fine)[:: 1 if broken == "attacker" else -1])
        update(model, optimizer, regularizer, 2)
        assert game.rounds == 1 and game.moving_baseline == 0.0
        assert game.last_round["attacker_won"] == float(broken == "defender")
        assert "rounds" not in regularizer.statistics.take() and "not finite" in caplog.text
        assert same(before, game.generator)
        advantages = game.advantages(torch.tensor([0.1, -0.3, 0.4]))
        assert advantages.square().mean().sqrt() == pytest.approx(1.0), "the next round is as a first one"


@pytest.mark.parametrize("later", ["unfrozen", "a group of the optimizer's"])
def test_what_is_trained_later_the_defender_trains_too(later):
    model, optimizer, regularizer = begin()
    held = list(model.encoder.layers[0].feed_forward.parameters())
    if later == "unfrozen":
        model.encoder.requires_grad_(False)
    else:
        optimizer.param_groups[0]["params"] = [p for p in model.parameters() if all(p is not other for other in held)]
    with regularizer.attach(model):
        update(model, optimizer, regularizer, 0)
        weight = regularizer.game.defender.model.encoder.layers[0].feed_forward[0].weight
        before = weight.detach().clone()
        model.encoder.requires_grad_(True)
        if later != "unfrozen":
            optimizer.add_param_group({"params": held, "lr": 0.5})
        update(model, optimizer, regularizer, 1)
        assert not weight.equal(before)
        play(model, optimizer, regularizer, (2, 3, 4))  # beyond a round, whose winner is copied
        assert regularizer.game.rounds == 1
        if later != "unfrozen":
            assert regularizer.game.defender.optimizer.param_groups[1]["lr"] == 0.5
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ValueError, match="parameters that are not the attached model's"):
            update(model, optimizer, regularizer, 5)


def test_a_game_resumed_in_evaluation_mode_trains_both_players():
    """`from_pretrained` leaves a model so, and a loop may resume before it calls train()."""
    model, optimizer, regularizer = begin()
    with regularizer.attach(model):
        update(model, optimizer, regularizer, 0)
        state = copy.deepcopy(regularizer.state_dict())
    with regularizer.attach(model.eval()):
        regularizer.resume(state)
        model.late = torch.nn.Identity()  # as a model may change the kind of its attention in its first forward
        update(model.train(), optimizer, regularizer, 1)
        model.eval()  # an update may end after an evaluation
        regularizer.game.defender.follow()
        assert all(module.training for module in regularizer.game.defender.model.modules())


def test_it_is_alone_on_its_model():
    model, optimizer, regularizer = begin(sites="encoder.self[0]")
    other, said = ADDrop(sites="encoder.self[1]"), "^attend_out combines with no other method: it trains two copies"
    for first, second in ((other, regularizer), (regularizer, other)):
        with first.attach(model), pytest.raises(ValueError, match=said):
            second.attach(model)
    with other.attach(model.encoder), pytest.raises(ValueError, match=said):
        regularizer.attach(model)
    with regularizer.attach(model), other.attach(model.encoder), pytest.raises(ValueError, match=said):
        update(model, optimizer, regularizer, 0)


def test_after_detaching_no_player_is_held():
    model, optimizer, regularizer = begin()
    with regularizer.attach(model):
        update(model, optimizer, regularizer, 0)
        expected = copy.deepcopy(regularizer.state_dict()["defender"]["model"])
    kept = regularizer.state_dict()["defender"]["model"]
    assert all(kept[name].equal(tensor) for name, tensor in expected.items()) and regularizer.game is None


@pytest.mark.parametrize("divided_by", ["their number", "3", "nothing"])
def test_the_defender_accumulates_as_the_attacker(divided_by):
    """Where no attention is dropped both make the same steps, of one batch and of several."""
    model, _, regularizer = begin(initial_keep=1 - 1e-6)
    regularizer.steps = 9  # the round does not end
    regularizer.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if divided_by != "their number":
        regularizer.problem.accumulation = 3 if divided_by == "3" else 1
    with regularizer.attach(model):
        for batches in ((0,), (1, 2, 3), (4, 5)):
            scale = {"their number": len(batches), "3": 3, "nothing": 1}[divided_by]
            for number in batches:
                ids, labels = BATCHES[number]
                (torch.nn.functional.cross_entropy(model(ids, labels), labels) / scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            regularizer.end_update()
        for ours, theirs in zip(model.parameters(), regularizer.game.defender.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
