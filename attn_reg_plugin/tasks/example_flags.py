"""Flags about the training examples: which are trained on and chosen by, and what is wrong with them."""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import FairseqDataclass
from omegaconf import OmegaConf, open_dict

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.labelled import AT_EVALUATION, Corruption, LabelledTask, Sampling, read_split

logger = logging.getLogger(__name__)


@dataclass
class TrainingPartConfig(FairseqDataclass):
    """The flags that tasks of translation have, too: which part of the training set is trained on."""

    train_examples: int = setting("train on N examples only, drawn at random, the same for every --seed; 0: on all", 0)
    train_fraction: float = setting("train on this share of the examples only, drawn at random; in (0, 1]", 1.0)
    train_sample_seed: int = setting("seed of all that is drawn at random of the training examples", 1)


@dataclass
class TrainingExamplesConfig(TrainingPartConfig):
    """The flags of labelled text."""

    train_per_class: int = setting("train on at most N examples of every class, drawn at random; 0: on all", 0)
    held_out: float = setting(
        "hold this share of the drawn training examples out, in [0, 1): they are the subset `valid`, by "
        "which checkpoints are chosen, and the official one isn't looked at",
        0.0,
    )
    label_noise: float = setting(
        "share of the drawn training labels that another one replaces, in [0, 1): any other class or choice", 0.0
    )
    shortcut: float = setting(
        "share of the drawn training examples, in [0, 1], that begin with a word which gives their label "
        "away; classification only",
        0.0,
    )
    shortcut_words: str = setting(
        "these words, with commas, one a class; default: rare words that the tokenizer knows as one piece", ""
    )
    shortcut_at_evaluation: str = setting(
        "what the examples of other splits begin with: none, as they are, or random, one of these words "
        "whatever the label",
        AT_EVALUATION[0],
    )


def sampling_of(cfg: Any) -> Sampling:
    """Make the `Sampling` that the flags ask for; tasks of translation have fewer of them."""
    names = {"train_examples": "examples", "train_fraction": "fraction", "train_per_class": "per_class"}
    names |= {"train_sample_seed": "seed", "held_out": "held_out"}
    return Sampling(**{name: getattr(cfg, flag) for flag, name in names.items() if hasattr(cfg, flag)})


def corruption_of(cfg: Any) -> Corruption:
    """Make the `Corruption` that the flags ask for."""
    words = tuple(word.strip() for word in (cfg.shortcut_words or "").split(",") if word.strip())
    return Corruption(cfg.label_noise, cfg.shortcut, words, cfg.shortcut_at_evaluation, cfg.train_sample_seed)


class TrainingExamples:
    """The examples of a task's splits as the flags ask for them; the words that are planted are kept in `cfg`."""

    def __init__(self, cfg: Any, task: LabelledTask, tokenizer: Any) -> None:
        self.source, self.task = cfg.data, task
        self.sampling = sampling_of(cfg)
        self.sampling.check(task)
        corruption = corruption_of(cfg)
        corruption.check(task)
        choose = corruption.shortcut and not corruption.words
        examples = read_split(task, cfg.data, "train") if choose else []
        self.corruption = corruption.with_words(task, tokenizer, examples)
        if choose:
            _keep_words(cfg, ",".join(self.corruption.words))

    def of(self, split: str) -> list[Any]:
        """Read the examples of a split; with --held-out, `valid` are those that are held out of training."""
        held_out = split == "valid" and self.sampling.held_out
        if split != "train" and not held_out:
            return self.corruption.of_evaluation(read_split(self.task, self.source, split), split)
        drawn = self.sampling.of(read_split(self.task, self.source, "train"))
        return self.sampling.parted(self.corruption.of_training(drawn, self.task))[bool(held_out)]


def _keep_words(cfg: Any, words: str) -> None:
    """Write the words into the task's configuration, and into the training's: the task has a copy of what is saved."""
    logger.info(f"--shortcut-words {words}: chosen, since none were given")
    training = cfg._get_parent() if OmegaConf.is_config(cfg) else None
    for config in (cfg, None if training is None else training.get("task")):
        if config is not None:
            keep_setting(config, "shortcut_words", words)


def keep_setting(config: Any, name: str, value: Any) -> None:
    """Write a value into a configuration of fairseq's, an OmegaConf one or a namespace; it goes into checkpoints."""
    with open_dict(config) if OmegaConf.is_config(config) else nullcontext():
        setattr(config, name, value)
