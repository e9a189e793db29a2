"""fairseq's RoBERTa with sentence prediction, regularized, on binarized made-up sentences."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from tests.tasks.fairseq_runs import Finished, differing, run, train, trained_state

pytestmark = pytest.mark.slow

MODEL = shlex.split(
    "--arch roberta_base --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    "--encoder-attention-heads 2 --dropout 0.1 --attention-dropout 0.1 --max-positions 32"
)
OWN = ["--criterion", "--label-smoothing", "--disable-validation", "--max-tokens"]
FLAGS = shlex.split(
    "--criterion sentence_prediction --classification-head-name head --init-token 0 --separator-token 2 "
    "--num-classes 2 --batch-size 8 --max-epoch 1"
)
SIZES = {"train": 32, "valid": 10}


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`input0`, `input1` and `label`, as fairseq's RoBERTa recipes lay them out."""
    root, generator = tmp_path_factory.mktemp("sentences"), random.Random(5)
    dictionary: list[str] = []
    for part in ("input0", "input1", "label"):
        for split, size in SIZES.items():
            length = 1 if part == "label" else 4
            lines = [
                " ".join(f"{generator.randrange(2 if length == 1 else 12)}" for _ in range(length)) for _ in range(size)
            ]
            (root / f"{split}.{part}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        prefixes = [text for split in SIZES for text in (f"--{split}pref", str(root / f"{split}.{part}"))]
        shared = dictionary if part == "input1" else []
        arguments = ["--only-source", "--workers", "1", "--destdir", str(root / "bin" / part), *prefixes, *shared]
        run("preprocess", arguments, root / f"{part}.log").check()
        dictionary = ["--srcdict", str(root / "bin" / "input0" / "dict.txt")]
    return root / "bin"


def predict(
    data: Path, save: Path, *flags: str, task: str = "attn_reg_sentence_prediction", **options: object
) -> Finished:
    return train(data, save, *FLAGS, *flags, task=task, model=MODEL, without=OWN, **options).check()


@pytest.mark.parametrize(
    "flags", ["--attn-reg ad_drop --ad-drop-cross-tuning off", "--attn-reg attend_out --attend-out-steps 2"]
)
def test_sentence_prediction(flags: str, sentences: Path, tmp_path: Path) -> None:
    finished = predict(sentences, tmp_path, *shlex.split(flags))
    assert [line["attn_reg/regularized"] for line in finished.lines()] == ["1"] * 4
    assert "attend_out" not in flags or any("attn_reg/attacker_won" in line for line in finished.lines())
    assert "valid_accuracy" in finished.lines("valid")[0]


def test_without_a_method_the_task_is_the_stock_one(sentences: Path, tmp_path: Path) -> None:
    predict(sentences, tmp_path / "ours")
    predict(sentences, tmp_path / "stock", task="sentence_prediction", user_dir=None)
    states = [trained_state(tmp_path / name / "checkpoint_last.pt") for name in ("ours", "stock")]
    assert differing(*states) == []
