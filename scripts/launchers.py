"""Try every way of starting several processes that docs/launchers.md names: two processes on this machine, on CPUs.

    python scripts/launchers.py [--only NAME] [--keep FOLDER]

SLURM is emulated: its environment variables are set, and a `scontrol` that answers this machine is put on the path.
A line for each says whether both processes made their updates as one training; the logs stay in the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import attn_reg_plugin

BIN = Path(sys.executable).parent
PLUGIN = Path(attn_reg_plugin.__file__).parent
TINY = "--arch transformer --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --decoder-embed-dim 16 "
TINY += "--encoder-ffn-embed-dim 16 --decoder-ffn-embed-dim 16 --encoder-attention-heads 2 --decoder-attention-heads 2 "
TINY += "--optimizer adam --lr 0.001 --criterion label_smoothed_cross_entropy --max-tokens 400 --max-update 4 --cpu "
TINY += "--num-workers 0 --disable-validation --no-epoch-checkpoints --log-format json --log-interval 1 "
TINY += "--distributed-world-size 2 --distributed-backend gloo --attn-reg ad_drop --ad-drop-cross-tuning off"

TRAINER = '''"""Trains a tiny classifier by transformers' Trainer."""
import sys, torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from attn_reg_plugin import ADDrop, AttnRegCallback
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
data = [{"input_ids": torch.arange(i % 7, i % 7 + 9), "labels": i % 2} for i in range(64)]
arguments = TrainingArguments(sys.argv[1], max_steps=4, logging_steps=1, use_cpu=True, report_to="none",
                              save_strategy="no", disable_tqdm=True, ddp_backend="gloo")
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data,
                  callbacks=[AttnRegCallback(ADDrop(cross_tuning="off"))])
trainer.train()
print(f"training on {arguments.world_size} devices, {trainer.state.global_step} updates", flush=True)
'''


@dataclass
class Launch:
    """One way: its commands, which run side by side, each with environment variables of its own."""

    name: str
    commands: list[str]
    environments: list[dict[str, str]] = field(default_factory=list)
    done: str = '"num_updates": "4"'


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launches(data: Path, folder: Path) -> list[Launch]:
    """Every way, its training kept in a folder of its own."""

    def fairseq(name: str) -> str:
        place = f"--task attn_reg_translation --user-dir {PLUGIN} --save-dir {folder / name}"
        return f"{data} {place} {TINY}"

    train, run, trainer = BIN / "fairseq-train", BIN / "torchrun", folder / "trainer.py"
    trainer.write_text(TRAINER, encoding="utf-8")
    nodes = f"--nnodes 2 --nproc_per_node 1 --master_addr 127.0.0.1 --master_port {free_port()}"
    meeting = f"--nnodes 2 --nproc_per_node 1 --rdzv_id 7 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{free_port()}"
    job = {"SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_LOCALID": "0"}
    tasks = [{**job, "SLURM_PROCID": str(rank), "SLURM_NODEID": "0"} for rank in (0, 1)]
    address = f"--distributed-init-method tcp://127.0.0.1:{free_port()} --distributed-no-spawn --device-id 0"
    updates, node = "training on 2 devices, 4 updates", f"{run} --nproc_per_node 2 --master_port"
    return [
        Launch("fairseq-torchrun", [f"{node} {free_port()} {train} {fairseq('torchrun')}"]),
        Launch("fairseq-torchrun-nodes", [f"{run} {nodes} --node_rank {n} {train} {fairseq('nodes')}" for n in (0, 1)]),
        Launch("fairseq-slurm", [f"{train} {fairseq('slurm')} --distributed-port {free_port()}"] * 2, tasks),
        Launch("fairseq-flags", [f"{train} {fairseq('flags')} {address} --distributed-rank {n}" for n in (0, 1)]),
        Launch("trainer-torchrun", [f"{node} {free_port()} {trainer} {folder / 't'}"], [], updates),
        Launch("trainer-torchrun-nodes", [f"{run} {meeting} {trainer} {folder / 'm'}"] * 2, [], updates),
    ]


def tried(launch: Launch, folder: Path) -> str:
    """Run it: `works`, or what went wrong."""
    given = launch.environments or [{}] * len(launch.commands)
    path = f"{folder}:{os.environ['PATH']}"
    logs = [folder / f"{launch.name}-{i}.log" for i in range(len(launch.commands))]
    processes = []
    for command, environment, log in zip(launch.commands, given, logs, strict=True):
        with log.open("w") as output:
            own = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment}
            processes.append(subprocess.Popen(shlex.split(command), env=own, stdout=output, stderr=output))
    try:
        codes = [process.wait(300) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.terminate()  # torchrun ends its workers then, which a kill would leave behind
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
        return f"did not end, see {logs[0]}"
    text = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    if any(codes) or launch.done not in text or "training on 2 devices" not in text or "regularized" not in text:
        return f"fails ({codes}), see {logs[0]}"
    return "works"


def main() -> int:
    """Try all, and say how each went; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="the names that contain this")
    parser.add_argument("--keep", help="folder of data and logs; a temporary one by default")
    arguments = parser.parse_args()
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="launchers-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n", encoding="utf-8")
    (folder / "scontrol").chmod(0o755)
    data = folder / "data"
    if not data.exists():
        words = "prepare phrasebook --pair en-ro --train 300 --valid 20 --test 20 --vocab-size 200 --out"
        subprocess.run([BIN / "attn-reg", *words.split(), data], check=True, stdout=subprocess.DEVNULL)
    failed = False
    for launch in launches(data / "bin", folder):
        if arguments.only in launch.name:
            outcome = tried(launch, folder)
            failed = failed or outcome != "works"
            print(f"{launch.name:24} {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
