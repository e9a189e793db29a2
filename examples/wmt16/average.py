"""Write the mean of a fairseq run's last checkpoints, as fairseq's scripts/average_checkpoints.py makes it:

    python examples/wmt16/average.py RUN/checkpoints/checkpoint_*.pt --out average.pt

That script has no --user-dir, and torch from 2.6 on refuses to read checkpoints for it. Train with
`--save-interval-updates N`, in `attn-reg compare` behind `--`, so that there are several. One that is there under
several names, such as the best or the last, counts once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from attn_reg_plugin.checkpoints import load_checkpoint, save_state


def main(argv: list[str] | None = None) -> None:
    """Average in fp64; half precision becomes fp32, and integers, such as a version, stay those of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    state, models = load_checkpoint(arguments.checkpoints[0]), {}
    for path in arguments.checkpoints:
        one = load_checkpoint(path)
        if {name: w.shape for name, w in one["model"].items()} != {name: w.shape for name, w in state["model"].items()}:
            parser.error(f"{path} has other weights than {arguments.checkpoints[0]}")
        history = one.get("optimizer_history")
        models[history[-1]["num_updates"] if history else path] = one["model"]
    for name, weight in state["model"].items():
        if weight.is_floating_point():
            kind = torch.float32 if weight.dtype in (torch.float16, torch.bfloat16) else weight.dtype
            state["model"][name] = torch.stack([model[name].double() for model in models.values()]).mean(0).to(kind)
    save_state(arguments.out, state)
    print(f"{arguments.out}: the mean of {len(models)} checkpoints")


if __name__ == "__main__":
    main()
