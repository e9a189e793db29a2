"""Data that a comparison refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments.methods import select_methods
from attn_reg_plugin.experiments.translation import TranslationComparison
from tests.experiments.toy_corpus import empty_corpus


@pytest.mark.parametrize(
    ("data", "out", "said"), [("data", "my:runs", "--out my:runs"), ("da:ta", "runs", "DATA da:ta")]
)
def test_paths_that_fairseq_splits_are_refused(
    data: str, out: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    empty_corpus(Path(data))
    assert main(["compare", data, "--out", out]) == 2
    assert f"{said} has ':', at which fairseq splits paths; give" in capsys.readouterr().err
    assert not Path(out).exists()


def test_pieces_that_would_not_be_joined_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """sentencepiece's way of joining takes the spaces out of other pieces, and BLEU is 0."""
    dictionary = empty_corpus(tmp_path / "data") / "bin" / "dict.ro.txt"
    dictionary.write_text("pi@@ 3\nsica 2\n", encoding="utf-8")
    asked = ["compare", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--cpu", "--methods", "plain"]
    assert main(asked) == 2
    assert f"{dictionary} has none of sentencepiece's pieces" in capsys.readouterr().err
    where = {"data": tmp_path / "data", "out": tmp_path / "out"}
    joined = TranslationComparison(**where, generate_flags="--post-process subword_nmt", seeds=(1,))
    (run,) = joined.plan(select_methods(["plain"]))
    assert run.generate_flags[-2:] == ("--post-process", "subword_nmt")
    (chosen,) = replace(joined, metric="bleu", generate_flags="--remove-bpe").plan(select_methods(["plain"]))
    flags = list(chosen.train_flags)
    assert flags[flags.index("--eval-bleu-remove-bpe") + 1] == "subword_nmt", "checkpoints are chosen by words, too"
