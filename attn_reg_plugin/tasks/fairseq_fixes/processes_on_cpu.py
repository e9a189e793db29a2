"""fairseq with several processes on CPUs: it takes for granted that each has a GPU, in two places.

`--ddp-backend pytorch_ddp` names the GPU of each process (`device_ids`), which PyTorch refuses for a model on a CPU.
Under `torchrun` a process's GPU is its rank modulo the number of GPUs, which is 0 there. With GPUs nothing is changed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from fairseq.distributed import utils
from fairseq.models import distributed_fairseq_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_infer_on_gpus = utils._infer_torch_distributed_launch_init


def data_parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """PyTorch's data parallel, without the devices that fairseq names if the model is on the CPU."""
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        options |= {"device_ids": None, "output_device": None}
    return DistributedDataParallel(module=module, **options)


def infer_from_launcher(config: Any) -> None:
    """Rank and number of processes as `torchrun` tells them; without a GPU a process has no device's number."""
    if torch.cuda.device_count():
        _infer_on_gpus(config)
        return
    config.distributed_init_method, config.distributed_no_spawn = "env://", True
    config.distributed_world_size, config.distributed_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    config.device_id = 0


def mend() -> None:
    """Put both in the place of fairseq's."""
    distributed_fairseq_model.DistributedDataParallel = data_parallel
    utils._infer_torch_distributed_launch_init = infer_from_launcher


mend()
