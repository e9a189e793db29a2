"""fairseq's RoBERTa with sentence prediction and sentence ranking, regularized, on binarized made-up sentences."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from tests.tasks.fairseq_runs import Finished, differing, read_checkpoint, run, train

pytestmark = pytest.mark.slow

MODEL = shlex.split(
    "--arch roberta_base --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    "--encoder-attention-heads 2 --dropout 0.1 --attention-dropout 0.1 --max-positions 32"
)
OWN = ["--criterion", "--label-smoothing", "--disable-validation", "--max-tokens"]
FLAGS = shlex.split("--init-token 0 --separator-token 2 --num-classes 2 --batch-size 8 --max-epoch 1")
AD_DROP = shlex.split("--attn-reg ad_drop --attn-sites encoder.self --ad-drop-cross-tuning off --ad-drop-p 0.4")
SIZES = {"train": 32, "valid": 10}


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`input0`, `input1`, `input2` and `label`, as fairseq's RoBERTa recipes lay them out."""
    root, generator = tmp_path_factory.mktemp("sentences"), random.Random(5)
    raw, data = root / "raw", root / "bin"
    raw.mkdir()
    for split, size in SIZES.items():
        for part in ("input0", "input1", "input2"):
            lines = [
                " ".join(f"w{generator.randrange(12)}" for _ in range(generator.randint(2, 6))) for _ in range(size)
            ]
            (raw / f"{split}.{part}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        labels = [str(generator.randrange(2)) for _ in range(size)]
        (raw / f"{split}.label").write_text("\n".join(labels) + "\n", encoding="utf-8")
    shared: list[str] = []
    for part in ("input0", "input1", "input2", "label"):
        prefixes = [text for split in SIZES for text in (f"--{split}pref", str(raw / f"{split}.{part}"))]
        dictionary = [] if part == "label" else shared
        arguments = ["--only-source", "--workers", "1", "--destdir", str(data / part), *prefixes, *dictionary]
        run("preprocess", arguments, root / f"{part}.log").check()
        shared = shared or ["--srcdict", str(data / part / "dict.txt")]
    for split in SIZES:  # sentence ranking reads its labels as text
        (data / "label" / f"{split}.label").write_text((raw / f"{split}.label").read_text(encoding="utf-8"))
    return data


def predict(
    data: Path, save: Path, *flags: str, task: str = "attn_reg_sentence_prediction", **options: object
) -> Finished:
    criterion = ["--criterion", "sentence_prediction", "--classification-head-name", "head"]
    return train(data, save, *criterion, *FLAGS, *flags, task=task, model=MODEL, without=OWN, **options).check()


def rank(data: Path, save: Path, *flags: str, task: str = "attn_reg_sentence_ranking", **options: object) -> Finished:
    criterion = ["--criterion", "sentence_ranking", "--ranking-head-name", "sentence_classification_head"]
    return train(data, save, *criterion, *FLAGS, *flags, task=task, model=MODEL, without=OWN, **options)


def weights(save: Path) -> dict:
    return read_checkpoint(save / "checkpoint_last.pt")["model"]


def test_sentence_prediction_under_ad_drop(sentences: Path, tmp_path: Path) -> None:
    finished = predict(sentences, tmp_path, *AD_DROP)
    assert [line["regularized"] for line in finished.lines()] == ["1"] * 4
    dropped = [float(v) for line in finished.lines() for name, v in line.items() if name.startswith("drop_")]
    assert len(dropped) == 8 and all(0 < share < 1 for share in dropped)
    assert "valid_accuracy" in finished.lines("valid")[0]


def test_sentence_prediction_under_attend_out(sentences: Path, tmp_path: Path) -> None:
    flags = shlex.split("--attn-reg attend_out --attn-sites encoder.self --attend-out-steps 2")
    assert any("attacker_won" in line for line in predict(sentences, tmp_path, *flags).lines())


def test_without_a_method_both_tasks_are_the_stock_ones(sentences: Path, tmp_path: Path) -> None:
    stock = {"task": "sentence_prediction", "user_dir": None}
    ours, theirs = predict(sentences, tmp_path / "a"), predict(sentences, tmp_path / "b", **stock)
    assert ours.losses() == theirs.losses() and differing(weights(tmp_path / "a"), weights(tmp_path / "b")) == []
    stock["task"] = "sentence_ranking"
    ours, theirs = rank(sentences, tmp_path / "c").check(), rank(sentences, tmp_path / "d", **stock).check()
    assert ours.losses() == theirs.losses() and differing(weights(tmp_path / "c"), weights(tmp_path / "d")) == []


def test_sentence_ranking_under_ad_drop(sentences: Path, tmp_path: Path) -> None:
    finished = rank(sentences, tmp_path, *AD_DROP).check()
    assert [line["regularized"] for line in finished.lines()] == ["1"] * 4
    assert read_checkpoint(tmp_path / "checkpoint_last.pt")["task_state"]["attn_reg"]["updates"] == 4


def test_what_cannot_work_is_refused_in_one_sentence(sentences: Path, tmp_path: Path) -> None:
    refused = rank(sentences, tmp_path / "a", "--attn-reg", "attend_out")
    assert refused.status != 0 and "sentence ranking makes one per choice; use --task" in refused.output
    absent = rank(tmp_path / "absent", tmp_path / "b")
    assert absent.status != 0 and "absent/input0/dict.txt" in absent.output.strip().splitlines()[-1]
