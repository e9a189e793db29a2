"""The fairseq face in processes where transformers cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tasks.fairseq_runs import AD_DROP, Finished, Job, train_arguments


class Absent:
    """An import hook for which transformers and its tokenizers are not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] in ("transformers", "tokenizers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide_transformers() -> None:
    """In the new process, before fairseq's command."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("transformers", "tokenizers")]:
        del sys.modules[name]  # of the server that the process was forked from
    sys.meta_path.insert(0, Absent())


def train(data: Path | None, save: Path, *flags: str, task: str = "attn_reg_translation") -> Finished:
    return Job("train", train_arguments(data, save, *flags, task=task), save / "log", hide_transformers).wait()


def test_translation_trains_regularized(corpus: Path, tmp_path: Path) -> None:
    done = train(corpus, tmp_path, *AD_DROP, "--max-update", "2").check()
    assert len(done.losses()) == 2
    assert all(float(value) > 0 for line in done.lines() for name, value in line.items() if name.startswith("drop_"))
    assert any(name.startswith("drop_") for line in done.lines() for name in line), "the regularizer did nothing"
    assert (tmp_path / "checkpoint_last.pt").exists()


@pytest.mark.parametrize("task", ["attn_reg_text_classification"])
def test_labelled_text_is_refused_in_one_sentence(tmp_path: Path, task: str) -> None:
    (tmp_path / "train.tsv").write_text("text\tlabel\nyes\t1\nno\t0\n", encoding="utf-8")
    described = ["--text-columns", "text", "--label-column", "label", "--file-format", "tsv", "--hf-model", "a/name"]
    done = train(tmp_path, tmp_path / "run", *described, task=task)
    assert done.status != 0
    assert "need transformers, which cannot be imported" in done.output
    assert "pip install '.[fairseq,hf]'" in done.output
