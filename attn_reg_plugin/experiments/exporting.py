"""`attn-reg export`: a trained encoder as a folder that `from_pretrained` loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.files import naming_writer, whole_folder


@dataclass(frozen=True, kw_only=True)
class Export:
    """The settings of `attn-reg export`."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg export runs/rte/ad_drop-seed1 exported",
        "attn-reg export checkpoints/checkpoint_best.pt exported",
    )

    run_folder: Path = setting(
        "folder of a training with --arch hf_encoder (its best checkpoint is taken), or a checkpoint in it",
        metavar="RUN",
        positional=True,
    )
    out: Path = setting("folder to write; must be empty or not there yet", metavar="OUT", positional=True)

    def write(self) -> None:
        """Write model and tokenizer.

        Raises:
            ValueError: OUT is a file or not empty, or RUN isn't a training of an encoder.
            FileNotFoundError: RUN has no checkpoint.
            OSError: OUT cannot be written; nothing is left there.
        """
        from attn_reg_plugin.experiments.trained import load_trained

        with whole_folder(self.out) as folder:
            trained = load_trained(self.run_folder)
            with naming_writer(self.out):
                trained.model.model.save_pretrained(folder)
                trained.tokenizer.save_pretrained(folder)
        print(f"{self.out}: {type(trained.model.model).__name__} of {trained.checkpoint}, with its tokenizer")
