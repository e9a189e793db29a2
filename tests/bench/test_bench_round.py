"""AttendOut in `attn-reg bench`: a measured step is a whole round on both players."""

from __future__ import annotations

import pytest
import torch

from attn_reg_plugin.bench.families import PADDING, Settings, Workload, build_workload
from attn_reg_plugin.bench.measure import STEPS, measure_peaks
from attn_reg_plugin.bench.rows import Row, select_rows
from attn_reg_plugin.regularizers import AttendOut
from attn_reg_plugin.regularizers.attend_out.game import Game

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = {row.name: row for row in select_rows(None, "fairseq", "float32")}


def trained(family: str = "fairseq", **options) -> Workload:
    """A tiny workload whose optimizer has its state."""
    work = build_workload(Settings(family, "tiny", 4, 6, 0.5, 20, **options))
    work.update(work.loss(work.model, work.batch).loss)
    return work


@pytest.fixture
def games(monkeypatch: pytest.MonkeyPatch) -> list[Game]:
    """The games that are started."""
    started: list[Game] = []
    start = AttendOut.start
    monkeypatch.setattr(AttendOut, "start", lambda *given: started.append(start(*given)) or started[-1])
    return started


@pytest.mark.parametrize("family", ["fairseq", "bert"])
@pytest.mark.parametrize("name", ["attend_out", "attend_out_shared", "attend_out_all"])
def test_a_step_is_a_round_of_both_players(family: str, name: str, games: list[Game]) -> None:
    work, steps = trained(family), []
    work.optimizer.register_step_post_hook(lambda *_: steps.append("attacker"))
    with STEPS["round"](ROWS[name], work, False) as step:
        (game,) = games
        game.defender.optimizer.register_step_post_hook(lambda *_: steps.append("defender"))
        before = [p.clone() for p in game.generator.parameters()]
        step()
        assert steps == ["attacker", "defender"] * ROWS[name].updates
        assert any(not torch.equal(old, new) for old, new in zip(before, game.generator.parameters(), strict=True))
        for ours, theirs in zip(work.model.parameters(), game.defender.model.parameters(), strict=True):
            assert torch.equal(ours, theirs), "the winner is copied"


def test_the_defenders_update_is_that_of_plain_training(games: list[Game]) -> None:
    """Same batch, loss and optimizer: without dropout, one update of it ends in a plain update's weights."""
    plain, work, settled = trained(dropout=0.0), trained(dropout=0.0), []
    plain.update(plain.loss(plain.model, plain.batch).loss)
    row = Row("round", "round", kind="round", method="attend_out", options={"steps": 1, "sites": "*"})
    with STEPS["round"](row, work, False) as step:
        model, adam = games[0].defender.model, games[0].defender.optimizer
        adam.register_step_post_hook(lambda *_: settled.extend(p.detach().clone() for p in model.parameters()))
        step()
    for expected, found in zip(plain.model.parameters(), settled, strict=True):
        torch.testing.assert_close(found, expected)


def test_examples_are_rows_of_the_batch_and_weigh_alike() -> None:
    work = build_workload(Settings("fairseq", "tiny", 4, 6, 0.5, 20, dropout=0.0))
    problem, model = work, work.model.eval()
    (examples,) = problem.validation(8)
    assert examples["targets"].size(0) == 8
    losses = problem.loss(model, examples).loss
    for row, loss in enumerate(losses):
        example = {name: tensor[row : row + 1] for name, tensor in examples.items()}
        assert any(torch.equal(example["targets"][0], target) for target in work.targets)
        torch.testing.assert_close(problem.loss(model, example).loss[0], loss)
        real = example["targets"].ne(PADDING)
        logits = model(**{name: example[name] for name in work.inputs})[0]
        picked = logits.log_softmax(-1).gather(-1, example["targets"].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(loss, -(picked * real).sum() / real.sum())


def test_memory_counts_both_players_and_the_generator() -> None:
    work = trained()
    peaks = measure_peaks([ROWS["plain"], ROWS["attend_out"], ROWS["attend_out_shared"]], work)
    weights = sum(parameter.numel() * 4 for parameter in work.model.parameters())
    plain, own, shared = peaks["plain"], peaks["attend_out"], peaks["attend_out_shared"]
    assert shared - plain > 3 * weights, "the defender and its Adam stay"
    embedding = work.model.encoder.embed_tokens.weight.numel() * 4
    assert own - shared >= 3 * embedding, "an embedding of its own, with Adam's moments"
