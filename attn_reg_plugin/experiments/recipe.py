"""What all methods of a comparison share: the sizes of the model and how it is optimized."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, fields
from typing import Any


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


#: the schedulers of fairseq that the flags below suit
SCHEDULERS = ("inverse_sqrt", "polynomial_decay", "fixed")


@dataclass(frozen=True)
class Recipe:
    """Model and optimization, a Transformer base by default; each field is a flag of `attn-reg compare`.

    Raises ValueError when a size is not positive, a rate is outside its range or not finite, or the heads do not
    divide the embedding.
    """

    arch: str = _option("transformer", "fairseq architecture; the sizes below override its own")
    layers: int = _option(6, "layers of the encoder and of the decoder")
    embed_dim: int = _option(512, "width of the model")
    ffn_dim: int = _option(2048, "width of the feed-forward layers")
    heads: int = _option(8, "attention heads")
    dropout: float = _option(0.3, "residual dropout, in [0, 1)")
    max_tokens: int = _option(4096, "tokens in a batch")
    update_freq: int = _option(1, "batches in an update")
    epochs: int = _option(30, "epochs of training")
    lr: float = _option(5e-4, "peak learning rate of Adam")
    lr_scheduler: str = _option("inverse_sqrt", "decay of the learning rate: inverse_sqrt, polynomial_decay or fixed")
    warmup: int = _option(4000, "updates of warm-up")
    weight_decay: float = _option(1e-4, "weight decay")
    clip_norm: float = _option(0.0, "clip gradients at this norm; 0 is off")
    label_smoothing: float = _option(0.1, "label smoothing, in [0, 1)")

    def __post_init__(self) -> None:
        for entry in fields(self):
            if isinstance(entry.default, float) and not math.isfinite(getattr(self, entry.name)):
                raise ValueError(f"{_flag(entry.name)} is {getattr(self, entry.name)}, it must be finite")
        for name in ("layers", "embed_dim", "ffn_dim", "heads", "max_tokens", "update_freq", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}, it must be at least 1")
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}, it must lie in [0, 1)")
        for name in ("warmup", "weight_decay", "clip_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}, it must not be negative")
        if self.lr_scheduler not in SCHEDULERS:
            raise ValueError(f"--lr-scheduler is {self.lr_scheduler!r}, it must be one of {', '.join(SCHEDULERS)}")
        if self.lr <= 0:
            raise ValueError(f"--lr is {self.lr}, it must be positive")
        if self.embed_dim % self.heads:
            raise ValueError(f"--heads {self.heads} does not divide --embed-dim {self.embed_dim}")

    def flags(self, joint_dictionary: bool) -> list[str]:
        """The flags of fairseq-train; with a joint dictionary all embeddings are shared."""
        flags = ["--arch", self.arch]
        for side in ("encoder", "decoder"):
            flags += [f"--{side}-layers", str(self.layers), f"--{side}-embed-dim", str(self.embed_dim)]
            flags += [f"--{side}-ffn-embed-dim", str(self.ffn_dim)]
            flags += [f"--{side}-attention-heads", str(self.heads)]
        flags += ["--share-all-embeddings" if joint_dictionary else "--share-decoder-input-output-embed"]
        flags += ["--dropout", str(self.dropout), "--weight-decay", str(self.weight_decay)]
        flags += ["--criterion", "label_smoothed_cross_entropy"]
        flags += ["--label-smoothing", str(self.label_smoothing)]
        flags += ["--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", str(self.clip_norm)]
        flags += ["--lr", str(self.lr), "--lr-scheduler", self.lr_scheduler]
        flags += ["--warmup-updates", str(self.warmup)]
        flags += ["--warmup-init-lr", "1e-07"] if self.lr_scheduler == "inverse_sqrt" else []
        flags += ["--max-tokens", str(self.max_tokens), "--update-freq", str(self.update_freq)]
        return [*flags, "--max-epoch", str(self.epochs)]

    def standstill(self) -> list[str]:
        """More flags, with which the first update changes no bit of the model."""
        return ["--lr", "0", *(["--warmup-init-lr", "0"] if self.lr_scheduler == "inverse_sqrt" else [])]

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add one flag a field."""
        group = parser.add_argument_group("model and optimization (the same for every method)")
        for entry in fields(Recipe):
            text = f"{entry.metadata['help']} (default: {entry.default})"
            group.add_argument(_flag(entry.name), type=type(entry.default), default=entry.default, help=text)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Recipe:
        """The recipe of parsed arguments."""
        return cls(**{entry.name: getattr(arguments, entry.name) for entry in fields(cls)})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
