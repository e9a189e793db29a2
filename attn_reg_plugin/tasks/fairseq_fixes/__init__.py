"""Repairs of fairseq itself, put in place when the plugin's tasks are imported.

- numpy 2 took names away that `fairseq-eval-lm`, `--sample-break-mode eos`, `--num-batch-buckets` and NAT with a CRF
  use. numpy itself stays as it is: the modules of fairseq see it through an object of its own.
- With several processes on CPUs fairseq takes it for granted that each has a GPU: `--ddp-backend pytorch_ddp` names it
  (`device_ids`), which PyTorch refuses for a model on a CPU, and under `torchrun` a process's GPU is its rank modulo
  the number of GPUs, which is 0. With GPUs nothing is changed.
- A checkpoint goes from rank 0 to the other ranks as a file that torch 2.6 and later refuse to read: now as PyTorch
  hands over objects.
- fairseq writes one checkpoint whole and copies it byte by byte to the other names, so that a kill left half of
  `checkpoint_last.pt`: now a copy takes its name when it is whole.
- A meter stays in the log once it was used: averages of nothing, such as drop rates in plain epochs, show as `None`.
  Where no forward was regularized, none of ours are shown.
- hydra prints two lines among the translations of `fairseq-generate`.
"""

import logging
import os
import shutil
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from fairseq.data import data_utils, language_pair_dataset, token_block_dataset
from fairseq.distributed import utils
from fairseq.file_io import PathManager
from fairseq.logging.meters import AverageMeter, MetersDict
from fairseq.models import distributed_fairseq_model
from fairseq.modules import dynamic_crf_layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from attn_reg_plugin.callbacks import PREFIX

_copy = PathManager.copy
_all_values = MetersDict.get_smoothed_values
_infer_on_gpus = utils._infer_torch_distributed_launch_init


class NumpyAsBefore:
    """numpy, with the names that fairseq 0.12 needs of numpy 1."""

    compat = SimpleNamespace(long=int)
    int = int
    float = float

    def __getattr__(self, name: str) -> Any:
        """Return numpy's own."""
        return getattr(numpy, name)

    @staticmethod
    def percentile(*args: Any, interpolation: str | None = None, **kwargs: Any) -> Any:
        """Call `numpy.percentile`, whose `method` was called `interpolation`."""
        return numpy.percentile(*args, **kwargs if interpolation is None else {**kwargs, "method": interpolation})


def data_parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a module in PyTorch's data parallel, without fairseq's devices if the model is on the CPU."""
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        options |= {"device_ids": None, "output_device": None}
    return DistributedDataParallel(module=module, **options)


def infer_from_launcher(config: Any) -> None:
    """Take rank and number of processes from `torchrun`; without a GPU a process has no device's number."""
    if torch.cuda.device_count():
        _infer_on_gpus(config)
        return
    config.distributed_init_method, config.distributed_no_spawn = "env://", True
    config.distributed_world_size, config.distributed_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    config.device_id = 0


def broadcast(obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """Give an object of the rank `src_rank` to every rank of the group."""
    held = [obj]
    torch.distributed.broadcast_object_list(held, src_rank, group, dist_device)
    return held[0]


def copy_whole(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    """Copy a checkpoint, beside its name and then to it; where fairseq reaches files by iopath, as it does.

    The name beside is always the same, and not `whole_file`'s: what a kill leaves there, the next copy takes away.
    """
    if PathManager.path_requires_pathmanager(dst_path):
        return _copy(src_path, dst_path, overwrite)
    shutil.copyfile(src_path, f"{dst_path}.tmp")
    os.replace(f"{dst_path}.tmp", dst_path)
    return dst_path


def present_values(meters: MetersDict) -> dict[str, float]:
    """Return the values of all meters, but for averages of nothing, and for ours where the method did not act."""
    values = _all_values(meters)
    empty = {name for name, meter in meters.items() if isinstance(meter, AverageMeter) and meter.avg is None}
    if not values.get(f"{PREFIX}regularized"):
        empty |= {name for name in values if name.startswith(PREFIX)}
    return type(values)((name, value) for name, value in values.items() if name not in empty)


if not hasattr(numpy, "int"):
    for _module in (data_utils, language_pair_dataset, token_block_dataset, dynamic_crf_layer):
        _module.np = NumpyAsBefore()
distributed_fairseq_model.DistributedDataParallel = data_parallel
utils._infer_torch_distributed_launch_init = infer_from_launcher
utils._broadcast_object_slow = broadcast
PathManager.copy = staticmethod(copy_whole)
MetersDict.get_smoothed_values = present_values
logging.getLogger("hydra").setLevel(logging.INFO)
