"""Translations of fairseq-generate, in the corpus's order, and their scores by sacrebleu."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from attn_reg_plugin.experiments.data_folder import raw_lines

#: D-<sample id>, the score, the detokenized translation (which may be empty)
_HYPOTHESIS = re.compile(r"D-(\d+)\t[^\t]*\t(.*)", re.DOTALL)


@dataclass(frozen=True)
class Score:
    """BLEU and chrF of a test set (0 to 100), with sacrebleu's signatures."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str

    def as_dict(self) -> dict[str, float | str]:
        """For json."""
        return asdict(self)


def read_hypotheses(path: Path, count: int) -> list[str]:
    """The best translation of each of `count` sentences, sorted by sample id.

    `path` is the output of fairseq-generate, which translates in order of length. Raises ValueError
    unless there is a translation for each of the ids 0 … count − 1 and for no other.
    """
    found: dict[int, str] = {}
    for line in raw_lines(path):
        match = _HYPOTHESIS.fullmatch(line)
        if match:
            found.setdefault(int(match.group(1)), match.group(2))  # the best of an n-best list comes first
    missing = [index for index in range(count) if index not in found]
    if missing:
        raise ValueError(f"{path} holds {len(found)} translations of {count}; the first missing is {missing[0]}")
    if len(found) > count:
        raise ValueError(f"{path} holds {len(found)} translations, but there are {count} references")
    return [found[index] for index in range(count)]


def score(hypotheses: list[str], references: list[str]) -> Score:
    """BLEU and chrF of `hypotheses` on raw `references`; raises ValueError when their numbers differ."""
    from sacrebleu.metrics import BLEU, CHRF

    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} translations cannot be scored on {len(references)} references")
    bleu, chrf = BLEU(), CHRF()
    bleu_score = bleu.corpus_score(hypotheses, [references]).score
    chrf_score = chrf.corpus_score(hypotheses, [references]).score
    return Score(bleu_score, chrf_score, str(bleu.get_signature()), str(chrf.get_signature()))
