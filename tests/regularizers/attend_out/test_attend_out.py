"""AttendOut: equation 5 evaluated literally, the defender as a lone training, exact continuation."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from attn_reg_plugin import AttendOut
from attn_reg_plugin.regularizers import Tokens
from attn_reg_plugin.regularizers.attend_out import game, generator
from attn_reg_plugin.regularizers.attend_out.game import Game
from attn_reg_plugin.regularizers.attend_out.generator import PolicyGradient, policy_gradient, sample_masks
from tests.attention.tiny_model import PAD, TinyClassifier
from tests.regularizers.attend_out.playing import BATCHES, begin, play, same, update
from tests.regularizers.trainings import equal

IDS = BATCHES[0][0]


def test_a_rounds_gradient_is_equation_5_evaluated_literally():
    model, optimizer, regularizer = begin(baseline_momentum=0.25, generator_clip_norm=0.0)
    seen = {}

    def literal(advantages):
        """(1/m) Σ_k Σ_t (1/(n l²)) Σ log P(d) (r_t - b), a position at a time.

        Sequence k of the m that were sampled is the k-th example's masks of the T updates, whose terms add up.
        """
        sequences = [0.0] * len(BATCHES[0][0])
        for batch in regularizer.game.cache:
            logits = regularizer.game.generator(batch.tokens)
            valid = batch.tokens["encoder"].valid
            for example in range(valid.size(0)):
                terms = []
                for site, scores in logits.items():
                    for t in range(6):
                        for s in range(6):
                            if valid[example, t] and valid[example, s]:
                                keep = 1 / (1 + torch.exp(-scores[example, t, s]))
                                terms.append(torch.log(keep if batch.unpacked()[site][example, t, s] else 1 - keep))
                sequences[example] = sequences[example] + sum(terms) / len(terms) * advantages[batch.update]
        return sum(sequences) / len(sequences)

    rewards = []

    class Watched(Game):
        def update_generator(self, advantages):
            seen["advantages"] = advantages
            expected = torch.autograd.grad(literal(advantages), list(self.generator.parameters()), allow_unused=True)
            norm = super().update_generator(advantages)
            for parameter, ascent in zip(self.generator.parameters(), expected, strict=True):
                if ascent is not None:
                    torch.testing.assert_close(parameter.grad, -ascent, rtol=1e-5, atol=1e-8)
            return norm

        def advantages(self, given):
            rewards.append((given, self.moving_baseline))
            return super().advantages(given)

    regularizer.game_class = Watched
    with regularizer.attach(model):
        play(model, optimizer, regularizer, range(6))
    (first, start), (second, baseline) = rewards
    assert start == 0 and baseline == pytest.approx(0.75 * float(first.mean()), rel=1e-5)
    torch.testing.assert_close(seen["advantages"], second - baseline)


@pytest.mark.parametrize("options", [{}, {"embedding": "shared"}, {"sites": "encoder.self[0]"}], ids=str)
def test_the_gradient_kept_from_drawing_is_that_of_a_pass_of_its_own(options, monkeypatch):
    """Bit for bit, and so is what the generator learns, with as many kept as there is room for."""
    learnt, kept = [], []

    class Watched(Game):
        def update_generator(self, advantages):
            kept.append(sum(batch.gradient is not None for batch in self.cache))
            for batch in self.cache:
                _, own = policy_gradient(self.generator, batch.tokens, self.method.temperature, batch.unpacked())
                found = batch.gradient or own
                assert equal(own.weights, found.weights) and own.rows.keys() == found.rows.keys()
                assert equal([*own.rows.values()], [found.rows[key] for key in own.rows])
            return super().update_generator(advantages)

    for room in (3, 2, 0):
        model, optimizer, regularizer = begin(**options)
        regularizer.game_class = Watched
        with regularizer.attach(model):
            for number in range(6):
                update(model, optimizer, regularizer, number)
                if number == 0 and regularizer.game.cache[0].gradient:
                    size = PolicyGradient.bytes_of(regularizer.game.generator, regularizer.game.cache[0].tokens)
                    monkeypatch.setattr(game, "KEPT_BYTES", room * size)
            learnt.append(copy.deepcopy(regularizer.game.generator.state_dict()))
        monkeypatch.undo()
    assert kept == ([0] * 6 if options.get("embedding") == "shared" else [3, 3, 2, 2, 1, 0])
    assert all(torch.equal(value, other[name]) for name, value in learnt[0].items() for other in learnt[1:])


@pytest.mark.parametrize("broken", ["weights", "gradient"])
def test_a_generator_that_is_not_finite_is_said_once_and_nothing_is_learnt(broken, caplog, monkeypatch):
    model, optimizer, regularizer = begin()
    with regularizer.attach(model):
        update(model, optimizer, regularizer, 0)
        made = regularizer.game.generator
        if broken == "weights":
            with torch.no_grad():
                made.attention["encoder_self"].query.weight.fill_(math.nan)
        else:
            judged = generator.policy_objective
            monkeypatch.setattr(generator, "policy_objective", lambda *given: judged(*given) * math.inf)
        before = copy.deepcopy(made.state_dict())
        regularizer.statistics.take()
        play(model, optimizer, regularizer, range(1, 9))
        after, sums = made.state_dict(), regularizer.statistics.take()
        assert all(torch.equal(old.nan_to_num(7.0), after[name].nan_to_num(7.0)) for name, old in before.items())
        assert regularizer.game.rounds == 3 and "rounds" not in sums and "generator_gnorm" not in sums
        if broken == "weights":  # nothing is dropped, rather than everything
            assert sum(float(sums[f"dropped/{site.name}"]) for site in regularizer.attached_sites) == 0
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "generator's gradient or weights are not finite in round 1" in said[0]
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("winner", ["draw", "best", "attacker"])
def test_after_a_round_both_are_the_winner(winner):
    model, optimizer, regularizer = begin(winner=winner)
    with regularizer.attach(model):
        play(model, optimizer, regularizer, range(3))
        assert regularizer.game.rounds == 1 and not regularizer.game.cache
        assert same(model, regularizer.game.defender.model)
        scores = regularizer.game.last_round
    if winner == "best":
        assert scores["attacker_won"] == (scores["attacker_score"] > scores["defender_score"])
    assert winner != "attacker" or scores["attacker_won"] == 1


def test_masks_are_drawn_with_the_probability_they_claim():
    """Also where the model computes in bfloat16, whose numbers near 1 are far apart."""
    torch.manual_seed(0)
    logits = torch.tensor([-3.0, -1.0, 0.0, 0.5, 2.0])
    draws, temperature = 40_000, 1.7
    kept = sample_masks({"site": logits.expand(draws, 1, 5)}, temperature)["site"].sum((0, 1)).double()
    expected = torch.sigmoid(logits / temperature).double() * draws
    chi_square = ((kept - expected) ** 2 / expected + (kept - expected) ** 2 / (draws - expected)).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001
    model, _, regularizer = begin()
    with regularizer.attach(model), torch.autocast("cpu", dtype=torch.bfloat16):
        regularizer.start(model)
        found = regularizer.game.generator(regularizer.problem.tokens({"tokens": BATCHES[0][0]}))
    assert {logit.dtype for logit in found.values()} == {torch.float32}
    drawn = sample_masks({"site": torch.full((1, 1000, 2000), 8.0, dtype=torch.bfloat16)})["site"]
    expected = 1 - torch.sigmoid(torch.tensor(8.0)).item()
    assert abs((~drawn).float().mean().item() - expected) < 0.15 * expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reward_examples": 5}, "pairs one example with each update: reward_examples must be 0 or 3"),
        ({"baseline": "leave_one_out", "credit": "round"}, "needs credit='example'"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(ValueError, match=said):
        begin(**options)
    model = TinyClassifier().train()
    with AttendOut().attach(model), pytest.raises(ValueError, match="AttendOut needs to know the training"):
        model(*BATCHES[0])
    model, _, method = begin()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    said = r"the model itself\) was replaced by TinyClassifier.forward"
    with method.attach(model), pytest.raises(ValueError, match=said):
        model(*BATCHES[0])


@pytest.mark.parametrize(
    "told", [IDS, Tokens(IDS, IDS.ne(PAD)), {"decoder": IDS}, {"encoder": Tokens(IDS, IDS.ne(PAD).long())}]
)
def test_tokens_of_another_form_are_refused(told):
    model, _, method = begin()
    method.problem.tokens = lambda inputs: told
    with (
        method.attach(model),
        pytest.raises(ValueError, match=r"must give {'encoder': Tokens\(ids, valid\)}, valid of bool"),
    ):
        model(IDS)


def test_a_problem_without_examples_is_refused():
    model, optimizer, method = begin()
    method.problem.validation = lambda n: []
    with method.attach(model), pytest.raises(ValueError, match="validation gave no examples"):
        play(model, optimizer, method, range(3))


@pytest.mark.parametrize("how", ["resume", "load_state_dict"])
def test_a_state_of_other_sites_is_refused(how):
    model, optimizer, method = begin(sites="encoder.self[0]")
    with method.attach(model):
        play(model, optimizer, method, range(2))
        state = method.state_dict()
    model, optimizer, method = begin()
    with method.attach(model):
        for load in (getattr(method, how), lambda _: None):  # nor does it begin anew then
            with pytest.raises(ValueError, match=r"^its sites are others: encoder\.self"):
                load(state)
                play(model, optimizer, method, range(2))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_first_masks_keep_what_initial_keep_says(temperature):
    model, _, method = begin(initial_keep=0.9, temperature=temperature)
    with method.attach(model):
        generator = method.start(model).generator
    zero = torch.full((1, 200, 200), generator.offset)
    assert sample_masks({"site": zero}, temperature)["site"].float().mean() == pytest.approx(0.9, abs=0.01)


def test_an_optimizer_that_accelerate_wraps_is_the_one_inside():
    played, wrapper = [], type("AcceleratedOptimizer", (SimpleNamespace,), {})
    for wrap in (lambda optimizer: optimizer, lambda optimizer: wrapper(optimizer=optimizer)):
        model, optimizer, method = begin()
        method.optimizer = wrap(optimizer)
        with method.attach(model):
            play(model, optimizer, method, range(3))
        played.append(model)
    assert same(*played)
