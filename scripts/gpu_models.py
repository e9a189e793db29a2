"""Time AD-DROP in a BERT, in one with compiled layers, and in a sharded one (FSDP2, a single process):

    python scripts/gpu_models.py OUT.json [--device cpu]

On a CPU the model is tiny. `ms` is the median of a step's elapsed time, `same_loss` whether the first step with nothing
dropped has the plain model's loss, to float rounding.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertForSequenceClassification

from attn_reg_plugin import ADDrop
from attn_reg_plugin.files import write_json


def bert(device: str) -> torch.nn.Module:
    """A classifier of BERT-base's shape, on a CPU a tiny one, without dropout."""
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(1)
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **({} if device == "cuda" else tiny))
    return BertForSequenceClassification(config).to(device).train()


def plain(model: torch.nn.Module) -> None:
    """Leave the model as it is."""


def compiled(model: Any) -> None:
    """Compile each layer."""
    for layer in model.bert.encoder.layer:
        layer.compile(backend="inductor" if model.device.type == "cuda" else "aot_eager")


def sharded(model: Any) -> None:
    """Shard each layer and the rest, in one process."""
    for layer in model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(model)


def measure(prepare: Callable[[Any], None], device: str, steps: int) -> dict[str, Any]:
    """Train a few steps without and with AD-DROP; the first loss with p = 0 is compared with the model's own."""
    length, batch = (128, 32) if device == "cuda" else (8, 4)
    ids = torch.randint(5, 1000, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)
    found: dict[str, Any] = {}
    for name, p in (("plain", None), ("nothing", 0.0), ("ad_drop", 0.3)):
        model = bert(device)
        prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        times = []
        with nullcontext() if p is None else ADDrop(p=p, cross_tuning="off").attach(model):
            for index in range(steps):
                began = time.perf_counter()
                loss = model(input_ids=ids, labels=ids[:, 0] % 2).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                value = float(loss.detach())  # waits for the device
                times.append(1000 * (time.perf_counter() - began))
                if index == 0:
                    found[f"{name}_loss"] = value
        found[f"{name}_ms"] = statistics.median(times[1:])
    found["same_loss"] = abs(found["plain_loss"] - found["nothing_loss"]) < 1e-4
    return found


def main() -> None:
    """Measure all three, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if arguments.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        steps = 12 if arguments.device == "cuda" else 3
        found = {one.__name__: measure(one, arguments.device, steps) for one in (plain, sharded, compiled)}
        dist.destroy_process_group()
    write_json(arguments.out, found)
    print(found)


if __name__ == "__main__":
    main()
