"""AttendOut in `attn-reg bench`: a measured step is a whole round on both players, and its parts add up to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

import pytest
import torch

from attn_reg_plugin.bench.families import PADDING, Settings, Workload, build_workload
from attn_reg_plugin.bench.measure import measure_peaks, measure_seconds
from attn_reg_plugin.bench.rounds import PARTS, REST, Training, playing
from attn_reg_plugin.bench.rows import Row, select_rows
from attn_reg_plugin.regularizers.attend_out.game import Game

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = {row.name: row for row in select_rows(None, "torch", "float32")}
FAMILIES = ["torch", "fairseq"]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Game]:
    """The game of every round that ends."""
    ended: list[Game] = []
    end_round = Game.end_round
    monkeypatch.setattr(Game, "end_round", lambda self: (end_round(self), ended.append(self))[0])
    return ended


def trained(family: str = "torch") -> Workload:
    """A tiny workload whose optimizer has its state."""
    work = build_workload(Settings(family, "tiny", 4, 6, 0.5, 20))
    work.update(work.model(**work.inputs))
    return work


@contextmanager
def one_round(work: Workload, row: Row, light: bool = False) -> Iterator:
    """A step of `row`, with a clock that counts how often it is asked."""
    ticks = count()
    with ExitStack() as stack:
        yield stack.enter_context(playing(row, work, light, lambda: float(next(ticks))))


@pytest.mark.parametrize("family", [*FAMILIES, "bert"])
@pytest.mark.parametrize("name", ["attend_out", "attend_out_shared", "attend_out_all"])
def test_a_step_is_a_round_of_both_players(family: str, name: str, rounds: list[Game]) -> None:
    work, steps = trained(family), []
    work.optimizer.register_step_post_hook(lambda *_: steps.append("attacker"))
    with one_round(work, ROWS[name]) as step:
        (model, adam), (generator, _) = work.players[1:]
        adam.register_step_post_hook(lambda *_: steps.append("defender"))
        before = [p.clone() for p in generator.parameters()]
        assert not rounds
        step()
        assert len(rounds) == 1 and rounds[0].rounds == 1
        assert steps == ["attacker", "defender"] * ROWS[name].updates
        assert any(not torch.equal(old, new) for old, new in zip(before, generator.parameters(), strict=True))
        for ours, theirs in zip(work.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs), "the winner is copied"
    assert len(work.players) == 1


def test_the_defenders_update_is_that_of_plain_training(rounds: list[Game]) -> None:
    """Same batch, loss and optimizer: without dropout, one update of it ends in a plain update's weights."""
    plain, work = (build_workload(Settings("torch", "tiny", 4, 6, 0.5, 20, dropout=0.0)) for _ in range(2))
    for one in (plain, work):
        one.update(one.model(**one.inputs))
    plain.update(plain.model(**plain.inputs))
    row = Row("one", "one", kind="round", method="attend_out", options={"steps": 1, "sites": "*"})
    with one_round(work, row) as step:
        settled = rounds_defender(work)
        step()
    for expected, found in zip(plain.model.parameters(), settled, strict=True):
        torch.testing.assert_close(found, expected)


def rounds_defender(work: Workload) -> list[torch.Tensor]:
    """The defender's weights after its next step, before the winner is copied over it; filled by that step."""
    (model, adam), found = work.players[1], []
    adam.register_step_post_hook(lambda *_: found.extend(p.detach().clone() for p in model.parameters()))
    return found


def test_parts_add_up_to_the_row() -> None:
    rows = select_rows(["attend_out"], "torch", "float32")
    seconds = measure_seconds(rows, trained(), repeats=1, warmup=0)
    parts = [seconds[f"attend_out_{part}"][0] for part in (*PARTS, REST)]
    assert all(part > 0 for part in parts)
    assert set(seconds) == {row.name for row in rows}
    assert sum(parts) <= seconds["attend_out"][0]


def test_every_part_is_timed_as_often_as_it_happens() -> None:
    """With a clock that ticks once a look, a part that is called n times in T updates takes n / T."""
    with one_round(trained(), ROWS["attend_out"]) as step:
        parts = step()
    updates = ROWS["attend_out"].updates
    assert {part: parts[part] for part in PARTS} == {
        "masks": 1.0,
        "defender": 2.0,
        "evaluation": 1 / updates,
        "generator": 1 / updates,
        "settle": 1 / updates,
    }


def test_a_step_leaves_the_methods_as_they_were(rounds: list[Game]) -> None:
    with one_round(trained(), ROWS["attend_out"]) as step:
        step()
        assert not {"before_forward", "evaluate", "update_generator"} & set(vars(rounds[0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_examples_are_rows_of_the_batch_and_weigh_alike(family: str) -> None:
    work = build_workload(Settings(family, "tiny", 4, 6, 0.5, 20, dropout=0.0))
    problem, model = Training(work), work.model.eval()
    (examples,) = problem.validation(8)
    assert examples["targets"].size(0) == 8
    losses = problem.loss(model, examples).loss
    for row, loss in enumerate(losses):
        one = {name: tensor[row : row + 1] for name, tensor in examples.items()}
        assert any(torch.equal(one["targets"][0], target) for target in work.targets)
        torch.testing.assert_close(problem.loss(model, one).loss[0], loss)
        real = one["targets"].ne(PADDING)
        logits = model(**{name: one[name] for name in work.inputs})
        logits = logits[0] if isinstance(logits, tuple) else logits
        picked = logits.log_softmax(-1).gather(-1, one["targets"].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(loss, -(picked * real).sum() / real.sum())


def test_memory_counts_both_players_and_the_generator() -> None:
    work = trained()
    peaks = measure_peaks([ROWS["plain"], ROWS["attend_out"], ROWS["attend_out_shared"]], work)
    weights = sum(parameter.numel() * 4 for parameter in work.model.parameters())
    plain, own, shared = peaks["plain"], peaks["attend_out"], peaks["attend_out_shared"]
    assert shared.total - shared.step > plain.total - plain.step + 3 * weights, "the defender and its Adam stay"
    embedding = sum(table.weight.numel() * 4 for table in (work.model.embedding, work.model.positions))
    # positions are kept once a stack; the generator here reads one
    assert own.total - shared.total >= 3 * embedding, "an embedding of its own, with Adam's moments"
