"""Models that FSDP2 shards over two processes: gradients and masks are those of one process, whatever is probed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from tests.huggingface.processes import check, run_in_processes
from tests.regularizers.sharded_trainings import AD_DROP, UPDATES, Case, Run

KEPT = {**AD_DROP, "probe": "kept"}
CASES = {
    "bert": Case("bert"),
    "bert, kept": Case("bert", options=KEPT),
}


def whole(case: Case) -> dict[str, Any]:
    """What one process finds: of the joined batch, or the mean over both shares where masks are drawn at random."""
    if not case.drawn:
        return Run(case, None, sharded=False).found()
    runs = [Run(case, rank, sharded=False) for rank in range(2)]
    found: dict[str, Any] = {"gradients": []}
    for update in range(UPDATES):
        for run in runs:
            run.backward(update)
        shares = [run.gradients() for run in runs]
        names = dict.fromkeys([*shares[0], *shares[1]])
        mean = {name: sum(one[name] for one in shares if name in one) / 2 for name in names}
        found["gradients"].append(mean)
        for run in runs:
            for name, parameter in run.model.named_parameters():
                name = name.replace("_checkpoint_wrapped_module.", "")
                parameter.grad = mean[name].to(parameter.dtype) if name in mean else None
            run.step()
    return {**found, "masks": [run.masks for run in runs], "sums": [run.sums for run in runs]}


def all_cases(folder: Path, names: list[str]) -> None:
    """One of two processes."""
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        print(name, flush=True)
        found[name] = Run(CASES[name], dist.get_rank(), sharded=True).found()
    torch.save(found, folder / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    check(folder, run_in_processes(folder, all_cases, folder, list(CASES), processes=2))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_masks_are_those_of_one_process(processes: Any, name: str, one_thread: None) -> None:
    case, expected = CASES[name], whole(CASES[name])
    ours, theirs = (process[name] for process in processes)
    for update in range(UPDATES):
        gradients = expected["gradients"][update]
        assert ours["gradients"][update].keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(ours["gradients"][update][key], gradient, rtol=1e-5, atol=1e-5)
        if case.drawn:
            continue
        assert ours["masks"][update].keys() == expected["masks"][update].keys()
        for key, mask in expected["masks"][update].items():
            halves = [one["masks"][update][key] for one in (ours, theirs)]
            assert torch.cat(halves).equal(mask), key
