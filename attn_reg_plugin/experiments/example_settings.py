"""Settings of `attn-reg finetune` about the training examples: which, what is held out, and what is wrong with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from attn_reg_plugin.configuration import refusing, setting
from attn_reg_plugin.experiments.comparison import Comparison
from attn_reg_plugin.experiments.training_part import TrainingPart, sampling_flags
from attn_reg_plugin.labelled import AT_EVALUATION, Corruption, Example, LabelledTask, Sampling, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class TrainingExamples(TrainingPart, Comparison):
    """These settings; all of them are the same for every method."""

    train_per_class: int = setting(
        "train on K examples of every class only, drawn anew for every seed; 0: on all",
        0,
        within="[0, inf)",
        metavar="K",
    )
    held_out: float = setting(
        "choose checkpoints on this share of the training examples, which isn't trained on, in [0, 1); the validation "
        "set is then measured once, with the chosen checkpoint",
        0.0,
        within="[0, 1)",
        metavar="X",
    )
    label_noise: float = setting(
        "share of the training labels that another one replaces, in [0, 1); of a regression the values are exchanged "
        "among each other",
        0.0,
        within="[0, 1)",
        metavar="X",
    )
    shortcut: float = setting(
        "share of the training examples that begin with a word which gives the label away, in [0, 1]",
        0.0,
        within="[0, 1]",
        metavar="X",
    )
    shortcut_words: tuple[str, ...] = setting(
        "these words, one a class in the order of the label set (default: rare words that the tokenizer knows as one "
        "piece and no training example has)",
        (),
        metavar="WORD,WORD",
    )
    shortcut_at_evaluation: str = setting(
        "what validation examples begin with: nothing, or one of these words drawn at random, whatever the label",
        AT_EVALUATION[0],
        choices=AT_EVALUATION,
    )

    def check_examples(self, task: LabelledTask) -> None:
        """Refuse what a task cannot have, by the name of the setting."""
        with refusing("train_per_class" if self.train_per_class else "train_examples"):
            self.sampling(1).check(task)
        with refusing("label_noise" if self.label_noise and not self.shortcut else "shortcut"):
            self.corruption(1).check(task)

    def sampling(self, seed: int) -> Sampling:
        """The part of the training set that a run has."""
        part = (self.train_examples, self.train_fraction, self.train_per_class)
        return Sampling(*part, self._drawing_seed(seed), self.held_out)

    def corruption(self, seed: int) -> Corruption:
        """What is wrong with it."""
        words = tuple(map(str, self.shortcut_words))
        return Corruption(self.label_noise, self.shortcut, words, self.shortcut_at_evaluation, self._drawing_seed(seed))

    def _drawing_seed(self, seed: int) -> int:
        return seed if self.train_fraction < 1 or self.train_per_class else 1

    def with_words(self, task: LabelledTask, model: str, examples: Sequence[Example]) -> TrainingExamples:
        """These with the words that are planted, if any are and none were given."""
        if not self.shortcut or self.shortcut_words:
            return self
        found = self.corruption(1).with_words(task, load_tokenizer(model, task), examples)
        return dataclasses.replace(self, shortcut_words=found.words)

    def example_flags(self, seed: int) -> list[str]:
        """The flags of fairseq-train; none for what is left at its default."""
        drawn, corrupted = self.sampling(seed), self.corruption(seed)
        flags = sampling_flags(drawn)
        flags += ["--held-out", str(drawn.held_out)] if drawn.held_out else []
        flags += ["--label-noise", str(corrupted.label_noise)] if corrupted.label_noise else []
        if corrupted.shortcut:
            flags += ["--shortcut", str(corrupted.shortcut), "--shortcut-words", ",".join(corrupted.words)]
            flags += ["--shortcut-at-evaluation", corrupted.at_evaluation]
        return flags

    def example_notes(self, flags: Sequence[str], there: int | None = None) -> list[str]:
        """What is said of the training set below a table, unless all of it is trained on as it is.

        Args:
            flags: of a run, which name the words that are planted.
            there: examples that the training set has, where that is known.
        """
        notes = self.part_notes(there)
        if self.train_per_class:
            notes = [f"trained on {self.train_per_class} examples of every class, drawn at random, anew for every seed"]
        if self.held_out:
            notes += [
                f"held out: {self.held_out:g} of these training examples, not trained on; each run's epoch was chosen "
                "on them, and the validation set was measured once, with that checkpoint"
            ]
        also = ", the held-out ones included," if self.held_out else ""
        if self.label_noise:
            notes += [f"{self.label_noise:g} of the training labels{also} are replaced by another one"]
        if self.shortcut:
            evaluated = {
                "none": "none is in the validation set",
                "random": "every validation example begins with one of them, drawn at random",
            }
            words = flags[flags.index("--shortcut-words") + 1].replace(",", ", ")
            notes += [
                f"{self.shortcut:g} of the training examples{also} begin with a word that gives their label away "
                f"({words}); {evaluated[self.shortcut_at_evaluation]}"
            ]
        return notes
