"""DeepSpeed's ZeRO in two processes: stages 1 and 2 give the weights of one process; stage 3 is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from tests.processes import check, run_in_processes
from tests.regularizers.base.parallel_trainings import Case, Run, loss_of, share

pytestmark = pytest.mark.clients
CASES = {
    "1": Case("bert"),
    "1, attached before": Case("bert", attached=True),
    "2": Case("marian", checkpointing="model"),
    "2, llama": Case("llama", checkpointing="model"),
}


def initialized(run: Run, stage: int) -> Any:
    """DeepSpeed's engine around a run's model; without the clipping that is its default."""
    import deepspeed

    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    settings["zero_optimization"] = {"stage": stage}
    return deepspeed.initialize(model=run.model, optimizer=run.optimizer, config=settings)[0]


def all_cases(folder: Path) -> None:
    """Train as a process of two, in every way."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for minutes
    deepspeed.init_distributed(dist_backend="gloo")
    rank, found = torch.distributed.get_rank(), {}
    for name, case in CASES.items():
        run = Run(case, rank, sharded=False)
        engine = initialized(run, int(name[0]))
        for update in range(case.updates):
            engine.backward(loss_of(case, engine, share(case, update, 0, rank)))
            engine.step()
            run.regularizer.end_update()
        found[name] = {key: value.detach() for key, value in run.model.named_parameters()}
    run = Run(Case("bert"), rank, sharded=False)
    engine = initialized(run, 3)
    with pytest.raises(ValueError, match="sharded by DeepSpeed ZeRO 3, in which ad_drop cannot act"):
        engine(**share(run.case, 0, 0, rank))
    torch.save(found, folder / f"{rank}.pt")


def test_it_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    check(tmp_path, run_in_processes(tmp_path, all_cases, tmp_path, processes=2))
    for name, case in CASES.items():
        run = Run(case, None, sharded=False)
        run.found()
        for rank in range(2):
            theirs = torch.load(tmp_path / f"{rank}.pt", weights_only=True)[name]
            for key, weight in run.model.named_parameters():
                torch.testing.assert_close(theirs[key], weight.detach(), rtol=1e-5, atol=1e-5)
