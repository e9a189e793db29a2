"""Bad input ends before training, in one sentence that says what was given, what is allowed, and where."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest

from attn_reg_plugin.tasks.attn_reg_translation import AttnRegTranslationTask
from tests.backends.fairseq_models import words
from tests.tasks.fairseq_runs import AD_DROP, Trained, make_corpus, train
from tests.tasks.tasks_in_process import options

pytestmark = pytest.mark.slow

SITES = re.escape("encoder.self[0] encoder.self[1] decoder.self[0] decoder.cross[0] decoder.self[1] decoder.cross[1]")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--ad-drop-p", "1.5", r"p is 1\.5, but must lie in \[0, 1\]"),
        ("--ad-drop-q", "nan", r"q is nan, but must lie in \[0, 1\]"),
        ("--attn-sites", "encoder.cross", r"'encoder\.cross' matches nothing in this model; its sites are: " + SITES),
        ("--attn-sites", "decoder.self[0,5]", r"'decoder\.self\[0,5\]' matches nothing in this model.*" + SITES),
        ("--attn-sites", "self", r"'self' is not understood; write for example 'encoder\.self'"),
        ("--attn-sites", " ", r"site pattern is empty; write for example"),
        ("--attn-reg", "dropblock", r"'dropblock', but must be one of none, ad_drop"),
        ("--ad-drop-cross-tuning", "weekly", r"'weekly', but must be epoch, off, or update:N"),
        ("--ad-drop-cross-tuning", "update:0", r"'update:0', but must be epoch, off, or update:N with N of at least 1"),
        ("--ad-drop-attribution", "lime", r"'lime', but must be one of gradient, integrated, attention, random"),
        ("--ad-drop-labels", "silver", r"'silver', but must be one of pseudo, gold"),
        ("--ad-drop-direction", "up", r"'up', but must be one of high, low"),
        ("--ad-drop-probe-dropout", "maybe", r"--ad-drop-probe-dropout is 'maybe', but must be true or false"),
        ("--ad-drop-probe-dtype", "int8", r"'int8', but must be one of same, bfloat16"),
        ("--ad-drop-integrated-steps", "0", r"integrated_steps is 0, but must be at least 1"),
    ],
)
def test_a_bad_value_is_named(flag: str, value: str, said: str, corpus: Path, tmp_path: Path) -> None:
    finished = train(corpus, tmp_path, *AD_DROP, f"{flag}={value}", "--max-update", "1")
    assert finished.status == 1
    last = finished.output.strip().splitlines()[-1]
    assert last.startswith("ValueError: ") and re.search(said, last), last
    assert finished.lines() == [] and not list(tmp_path.glob("*.pt"))


def test_missing_data_is_named(tmp_path: Path) -> None:
    finished = train(tmp_path / "nowhere", tmp_path, *AD_DROP)
    assert finished.status == 1
    last = finished.output.strip().splitlines()[-1]
    assert "--source-lang" in last or "nowhere" in last, last


def test_missing_data_is_named_where_the_languages_are(tmp_path: Path) -> None:
    finished = train(tmp_path / "nowhere", tmp_path, *AD_DROP, "--source-lang", "en", "--target-lang", "ro")
    assert finished.status == 1
    assert "nowhere" in finished.output.strip().splitlines()[-1]


def test_a_number_of_examples_of_data_in_parts_is_refused() -> None:
    cfg = options(attn_reg="none", data="a:b", train_examples=5)
    with pytest.raises(ValueError, match=r"^--train-examples 5 would be drawn of each part of the data a:b; give --tr"):
        AttnRegTranslationTask(cfg, words(), words())
    for allowed in ({"data": "a"}, {"train_examples": 0, "train_fraction": 0.5}):
        AttnRegTranslationTask(Namespace(**{**vars(cfg), **allowed}), words(), words())


def test_parameters_sharded_by_fairscale_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^--ddp-backend fully_sharded .* --attn-reg ad_drop cannot act; use --ddp-b"):
        AttnRegTranslationTask(options(attn_reg="ad_drop", attn_ddp_backend="fully_sharded"), words(), words())
    for allowed in ({"attn_reg": "none", "attn_ddp_backend": "fully_sharded"}, {"attn_reg": "ad_drop"}):
        AttnRegTranslationTask(options(**allowed), words(), words())


def test_a_missing_model_is_named(corpus: Path, tmp_path: Path) -> None:
    finished = train(corpus, tmp_path, *AD_DROP, "--finetune-from-model", str(tmp_path / "gone.pt"))
    assert finished.status == 1
    assert re.search(r"gone\.pt does not exist", finished.output.strip().splitlines()[-1])


def test_a_vocabulary_that_does_not_fit_the_embedding(stock: Trained, tmp_path: Path) -> None:
    other = make_corpus(tmp_path / "other", words=31)
    finished = train(other, tmp_path / "save", *AD_DROP, "--finetune-from-model", str(stock.checkpoint))
    assert finished.status == 1 and finished.lines() == []
    assert re.search(r"embed_tokens.*\[5\d, 16\].*\[7\d, 16\]", finished.output), "both sizes are named"
    assert str(stock.checkpoint) in finished.output.strip().splitlines()[-1]
