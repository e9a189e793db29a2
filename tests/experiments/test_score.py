"""Collecting translations, and scoring them."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_reg_plugin.experiments.data_folder import raw_lines
from attn_reg_plugin.experiments.score import read_hypotheses, score

OUTPUT = (
    "2026-01-01 00:00:00 | INFO | fairseq_cli.generate | loading model(s)\n"
    "S-2\tthe rain\nT-2\tploaia\nH-2\t-0.5\t▁ploa ia\nD-2\t-0.5\tploaia\nP-2\t-0.1 -0.9\n"
    "H-0\t-inf\t\nD-0\t-inf\t\nP-0\t-inf\n"
    "D-1\t-0.2\ta\u2028b c\nD-1\t-0.9\tsecond best\n"
    "Generate test with beam=5: BLEU4 = 0.00\n"
)


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "generate-test.txt"
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def test_hypotheses_come_in_the_order_of_the_corpus(tmp_path: Path) -> None:
    """Ids out of order, an empty translation, a line separator within one, an n-best list."""
    assert read_hypotheses(_write(tmp_path, OUTPUT), 3) == ["", "a\u2028b c", "ploaia"]


def test_a_missing_hypothesis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds 3 translations of 5; the first missing is 3"):
        read_hypotheses(_write(tmp_path, OUTPUT), 5)


def test_a_hypothesis_too_many_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds 3 translations, but there are 2 references"):
        read_hypotheses(_write(tmp_path, OUTPUT), 2)


def test_lines_are_split_at_newlines_only(tmp_path: Path) -> None:
    """sacrebleu and fairseq count lines so; `splitlines` would give more."""
    assert raw_lines(_write(tmp_path, "a\u2028b\n\nc\x0bd\n")) == ["a\u2028b", "", "c\x0bd"]
    assert raw_lines(_write(tmp_path, "a\n\n")) == ["a", ""]
    assert raw_lines(_write(tmp_path, "")) == []


def test_scores_are_those_of_sacrebleu_with_signatures() -> None:
    references = ["the cat sat on the mat .", "a dog barked at the old tree"]
    same = score(references, references)
    assert same.bleu == pytest.approx(100) and same.chrf == pytest.approx(100)
    assert "tok:13a" in same.bleu_signature and "nc:6" in same.chrf_signature
    swapped = score(references[::-1], references)
    assert swapped.bleu < 10 and swapped.chrf < 50


def test_unequal_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="1 translations cannot be scored on 2 references"):
        score(["a"], ["a", "b"])
