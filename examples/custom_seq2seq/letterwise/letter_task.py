"""A task of a user's own: translation letter by letter, straight from text files. It knows no regularizer."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import MISSING


@dataclass
class LetterConfig(FairseqDataclass):
    """The task's flags."""

    data: str = field(default=MISSING, metadata={"help": "folder with train.LANG and valid.LANG"})
    source_lang: str = field(default="en", metadata={"help": "source language"})
    target_lang: str = field(default="ro", metadata={"help": "target language"})


@register_task("letters", dataclass=LetterConfig)
class LetterTask(FairseqTask):
    """Sentences as sequences of letters; one dictionary for both languages."""

    def __init__(self, cfg: LetterConfig) -> None:
        super().__init__(cfg)
        self.dictionary = Dictionary()
        for letter in sorted({letter for side in self.sides for line in self.lines("train", side) for letter in line}):
            self.dictionary.add_symbol(letter)

    @property
    def sides(self) -> tuple[str, str]:
        """Source and target language."""
        return self.cfg.source_lang, self.cfg.target_lang

    @property
    def source_dictionary(self) -> Dictionary:
        """The letters."""
        return self.dictionary

    target_dictionary = source_dictionary

    def lines(self, split: str, side: str) -> list[str]:
        """The sentences of one side, spaces written visibly."""
        text = Path(self.cfg.data, f"{split}.{side}").read_text(encoding="utf-8")
        return [line.replace(" ", "▁") for line in text.splitlines()]

    def load_dataset(self, split: str, **kwargs: object) -> None:
        """Read a split."""
        sides = []
        for side in self.sides:
            encoded = [[self.dictionary.index(letter) for letter in line] for line in self.lines(split, side)]
            rows = [torch.tensor([*row, self.dictionary.eos()]) for row in encoded]
            sides.append((rows, [len(row) for row in rows], self.dictionary))
        (source, source_sizes, letters), (target, target_sizes, _) = sides
        self.datasets[split] = LanguagePairDataset(
            source, source_sizes, letters, target, target_sizes, letters, left_pad_source=False
        )
