"""Write the mean of a fairseq run's last checkpoints, as fairseq's scripts/average_checkpoints.py makes it:

    python average.py RUN/checkpoints/checkpoint*.pt --out average.pt

That script has no --user-dir, and torch from 2.6 on refuses to read checkpoints for it. Train with
`--save-interval-updates N`, in `attn-reg compare` behind `--`, so that there are several.
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
    states = [load_checkpoint(path) for path in arguments.checkpoints]
    models = [state["model"] for state in states]
    for path, model in zip(arguments.checkpoints, models, strict=True):
        if {name: one.shape for name, one in model.items()} != {name: one.shape for name, one in models[0].items()}:
            parser.error(f"{path} has other weights than {arguments.checkpoints[0]}")
    for name, weight in models[0].items():
        if weight.is_floating_point():
            kind = torch.float32 if weight.dtype in (torch.float16, torch.bfloat16) else weight.dtype
            states[0]["model"][name] = torch.stack([model[name].double() for model in models]).mean(0).to(kind)
    save_state(arguments.out, states[0])
    print(f"{arguments.out}: the mean of {len(models)} checkpoints")


if __name__ == "__main__":
    main()
