"""AttendOut in any loop of two processes: they stay in step, and equation 5 is that of the joined batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from attn_reg_plugin import AttendOut
from attn_reg_plugin.regularizers.attend_out.game import CachedBatch, Game
from attn_reg_plugin.regularizers.attend_out.generator import policy_objective
from attn_reg_plugin.regularizers.base.distributed import average
from tests.attention.tiny_model import TinyClassifier, tokens
from tests.processes import check, run_in_processes
from tests.regularizers.attend_out.playing import Classification

ROUNDS, STEPS = 20, 2


def play(folder: Path) -> None:
    """Play as a process of two; the second has fewer examples, and none in every fifth update."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert average(torch.full((2,), 4e4, dtype=torch.half)).tolist() == [4e4, 4e4], "the sum is beyond fp16"
    torch.manual_seed(0)
    model = TinyClassifier().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    regularizer = AttendOut(problem=Classification(), optimizer=optimizer, steps=STEPS, generator_clip_norm=0.0)
    torch.manual_seed(rank)  # each its own masks, examples and generator, were it not given the first one's
    seen: list[dict[str, Any]] = []

    class Watched(Game):
        def update_generator(self, advantages: torch.Tensor) -> float:
            kept = {name: value.clone() for name, value in self.generator.state_dict().items()}
            cache = [batch.state_dict() for batch in self.cache]
            norm = super().update_generator(advantages)
            gradient = [p.grad.clone() for p in self.generator.parameters()]
            entry = {"generator": kept, "cache": cache, "advantages": advantages}
            seen.append({**entry, "gradient": gradient, "norm": norm})
            return norm

    regularizer.game_class = Watched
    with regularizer.attach(model):
        for number in range(ROUNDS * STEPS):
            lengths = [6, 4, 2][: 1 if rank else 3 - number % 2]
            ids = tokens(lengths, 6, seed=2 * number + rank)
            labels, empty = ids[:, 0] % 3, rank == 1 and number % 5 == 4
            regularizer.supply(counts=not empty)
            (F.cross_entropy(model(ids, labels), labels) * (0 if empty else 1)).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
            regularizer.end_update()
            if regularizer.game.in_round == 0:
                seen[-1].update(regularizer.game.last_round, model=[p.detach().clone() for p in model.parameters()])
    torch.save(seen, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("processes")
    check(folder, run_in_processes(folder, play, folder, processes=2))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_the_same_winners_and_weights(played: list[list[dict[str, Any]]]) -> None:
    assert [len(rounds) for rounds in played] == [ROUNDS, ROUNDS]
    for ours, theirs in zip(*played, strict=True):
        for key in ("attacker_won", "attacker_score", "defender_score", "baseline", "reward", "norm"):
            assert ours[key] == theirs[key], key
        assert all(torch.equal(a, b) for a, b in zip(ours["model"], theirs["model"], strict=True))
        assert all(torch.equal(value, theirs["generator"][name]) for name, value in ours["generator"].items())
    assert {entry["attacker_won"] for entry in played[0]} == {0.0, 1.0}


def test_the_gradient_is_that_of_the_joined_batches(played: list[list[dict[str, Any]]]) -> None:
    model = TinyClassifier()
    sizes = set()
    for ours, theirs in zip(*played, strict=True):
        method = AttendOut(steps=STEPS)
        with method.attach(model):
            generator = method.make_generator(model)
        generator.load_state_dict(ours["generator"])
        cache = [CachedBatch.from_state_dict(batch, torch.device("cpu")) for batch in ours["cache"] + theirs["cache"]]
        sizes.add(len(cache))
        masks = sum(batch.tokens["encoder"].ids.size(0) for batch in cache)
        objective = 0.0
        for batch in cache:
            drawn = batch.unpacked()
            of_batch = policy_objective(generator, batch.tokens, generator(batch.tokens), drawn)
            objective = objective + of_batch * ours["advantages"][batch.update] * STEPS / masks
        (-objective).backward()
        for parameter, gradient in zip(generator.parameters(), ours["gradient"], strict=True):
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)
    assert sizes == {2 * STEPS, 2 * STEPS - 1}, "with and without an empty share"
