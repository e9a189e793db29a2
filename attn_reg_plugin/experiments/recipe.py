"""What all methods of a comparison share: the sizes of the model and how it is optimized."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.experiments.training_part import SCHEDULERS, TO_THE_END

#: `linear` as fairseq calls it, which ends with the last update only where the batches are of so many pairs
POLYNOMIAL = "polynomial_decay"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Model and optimization, a Transformer base by default.

    Raises:
        ValueError: the heads do not divide the embedding.
    """

    arch: str = setting("fairseq architecture; the sizes below override its own", "transformer")
    layers: int = setting("layers of the encoder and of the decoder", 6, within="[1, inf)")
    embed_dim: int = setting("width of the model", 512, within="[1, inf)")
    ffn_dim: int = setting("width of the feed-forward layers", 2048, within="[1, inf)")
    heads: int = setting("attention heads", 8, within="[1, inf)")
    dropout: float = setting("residual dropout, in [0, 1)", 0.3, within="[0, 1)")
    max_tokens: int = setting("tokens in a batch", 4096, within="[1, inf)")
    batch_size: int = setting("sentences in a batch, at most; 0: as many as --max-tokens allows", 0, within="[0, inf)")
    update_freq: int = setting("batches in an update", 1, within="[1, inf)")
    epochs: int = setting("epochs of training", 30, within="[1, inf)")
    lr: float = setting("peak learning rate of Adam", 5e-4, within="(0, inf)")
    lr_scheduler: str = setting(
        f"course of the learning rate after the warm-up; {' and '.join(TO_THE_END)} end with the last update, as "
        f"{POLYNOMIAL} does where --batch-size is given",
        "inverse_sqrt",
        choices=(*SCHEDULERS, POLYNOMIAL),
    )
    warmup: int = setting("updates of warm-up", 4000, within="[0, inf)")
    weight_decay: float = setting("weight decay", 1e-4, within="[0, inf)")
    clip_norm: float = setting("clip gradients at this norm; 0 is off", 0.0, within="[0, inf)")
    label_smoothing: float = setting("label smoothing, in [0, 1)", 0.1, within="[0, 1)")

    def __post_init__(self) -> None:
        """Check what depends on two settings."""
        if self.embed_dim % self.heads:
            raise ValueError(f"--heads {self.heads} does not divide --embed-dim {self.embed_dim}")

    def sizes(self, joint_dictionary: bool) -> list[str]:
        """The flags of fairseq-train for the model; with a joint dictionary all embeddings are shared."""
        flags = ["--arch", self.arch]
        for side in ("encoder", "decoder"):
            flags += [f"--{side}-layers", str(self.layers), f"--{side}-embed-dim", str(self.embed_dim)]
            flags += [f"--{side}-ffn-embed-dim", str(self.ffn_dim)]
            flags += [f"--{side}-attention-heads", str(self.heads)]
        return [*flags, "--share-all-embeddings" if joint_dictionary else "--share-decoder-input-output-embed"]

    @property
    def counts_updates(self) -> bool:
        """Whether the course of the learning rate ends with the last update, which `optimization` is told then."""
        return self.lr_scheduler in TO_THE_END

    def optimization(self, pairs: int | None = None, updates: int | None = None) -> list[str]:
        """The flags of fairseq-train for everything but the model.

        Args:
            pairs: training pairs, where they are known: the polynomial decay then ends with the last update, counted
                for one process.
            updates: of the whole training in one process, where `counts_updates`; None while they are not counted.

        Raises:
            ValueError: the training would end in the warm-up.
        """
        if updates is not None and self.warmup >= updates:
            raise ValueError(
                f"warmup is {self.warmup}, but must be below the {updates} updates of the training, with which "
                f"lr_scheduler {self.lr_scheduler} ends"
            )
        flags = ["--dropout", str(self.dropout), "--weight-decay", str(self.weight_decay)]
        flags += ["--criterion", "label_smoothed_cross_entropy"]
        flags += ["--label-smoothing", str(self.label_smoothing)]
        flags += ["--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", str(self.clip_norm)]
        flags += ["--lr", str(self.lr)]
        if self.lr_scheduler == POLYNOMIAL:
            flags += ["--lr-scheduler", POLYNOMIAL, "--warmup-updates", str(self.warmup)]
        else:
            flags += SCHEDULERS[self.lr_scheduler](self.warmup, updates or 0)
        flags += ["--warmup-init-lr", "1e-07"] if self.lr_scheduler == "inverse_sqrt" else []
        flags += ["--max-tokens", str(self.max_tokens), "--update-freq", str(self.update_freq)]
        flags += ["--max-epoch", str(self.epochs)]
        if self.batch_size:
            flags += ["--batch-size", str(self.batch_size)]
        if self.batch_size and pairs is not None and self.lr_scheduler == POLYNOMIAL:
            counted = math.ceil(math.ceil(pairs / self.batch_size) / self.update_freq) * self.epochs
            flags += ["--total-num-update", str(counted), "--distributed-world-size", "1"]
        return [*flags, *(["--distributed-world-size", "1"] if self.counts_updates else [])]

    def standstill(self) -> list[str]:
        """More flags, with which the first update changes no bit of the model."""
        return ["--lr", "0", *(["--warmup-init-lr", "0"] if self.lr_scheduler == "inverse_sqrt" else [])]
