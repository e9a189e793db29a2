"""What `finetune` and `compare` share of their trainings: the course of the learning rate, and the part trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.labelled import Sampling


def _scheduler(name: str, total: str = "", least: int = 0) -> Callable[[int, int], list[str]]:
    """The flags of a learning rate's course, of the updates of warm-up and of all; `total` takes those after it."""

    def flags(warmup: int, updates: int) -> list[str]:
        end = {"--total-num-update": updates, "--lr-period-updates": max(1, updates - warmup)}
        more = [total, str(end[total])] if total else []
        return ["--lr-scheduler", name, "--warmup-updates", str(max(least, warmup)), *more]

    return flags


#: course of the learning rate -> its flags of fairseq-train
SCHEDULERS: dict[str, Callable[[int, int], list[str]]] = {
    "linear": _scheduler("polynomial_decay", "--total-num-update"),
    "fixed": _scheduler("fixed"),
    "cosine": _scheduler("cosine", "--lr-period-updates"),
    "inverse_sqrt": _scheduler("inverse_sqrt", least=1),
}
#: flags of fairseq-train that say which examples are trained on, and which of them decide; only settings give them
PART_FLAGS = ("train-examples", "train-fraction", "train-per-class", "train-sample-seed", "held-out")
PART_FLAGS += ("label-noise", "shortcut", "shortcut-words", "shortcut-at-evaluation")
#: flags that settings decide -> which setting: given beside them, a run would not be what its settings say
DECIDED = {f"--{name}": name.replace("-", "_") for name in PART_FLAGS}
DECIDED |= {"--train-sample-seed": "seeds", "--seed": "seeds", "--save-dir": "out"}
#: those by which a metric chooses checkpoints
CHOOSING = {"--best-checkpoint-metric": "metric", "--maximize-best-checkpoint-metric": "metric"}
#: those that end with the last update
TO_THE_END = ("linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class TrainingPart:
    """The settings that say which part of the training set is trained on."""

    train_examples: int = setting(
        "train on N only, drawn at random, the same for every seed; 0: on all", 0, within="[0, inf)", metavar="N"
    )
    train_fraction: float = setting(
        "train on this share only, drawn anew for every seed, in (0, 1]", 1.0, within="(0, 1]"
    )

    def sampling(self, seed: int) -> Sampling:
        """The part of the training set that a run has.

        Raises:
            ValueError: more than one part is asked for.
        """
        return Sampling(self.train_examples, self.train_fraction, seed=seed if self.train_fraction < 1 else 1)

    def part_notes(self, there: int | None = None) -> list[str]:
        """What is said of the training set below a table, unless all is trained on.

        Args:
            there: examples that the training set has, where that is known.
        """
        if there is not None and 0 < there <= self.train_examples:
            return [f"trained on all {there} examples; {self.train_examples} were asked for"]
        if self.train_examples:
            return [f"trained on {self.train_examples} examples, drawn at random"]
        share = f"trained on {self.train_fraction:g} of the examples, drawn at random, anew for every seed"
        return [share] if self.train_fraction < 1 else []


def sampling_flags(sampling: Sampling) -> list[str]:
    """The flags of fairseq-train for a part of the training set."""
    flags = ["--train-examples", str(sampling.examples)] if sampling.examples else []
    flags += ["--train-fraction", str(sampling.fraction)] if sampling.fraction < 1 else []
    flags += ["--train-per-class", str(sampling.per_class)] if sampling.per_class else []
    return flags + (["--train-sample-seed", str(sampling.seed)] if sampling.seed != 1 else [])
