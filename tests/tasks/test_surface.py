"""The surface that a user sees: logs, fairseq's options, hydra, and other tasks made regularized in three lines."""

import math
import random
import re
import shlex
from argparse import Namespace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from attn_reg_plugin.tasks.flags import regularizer_from
from tests.tasks.fairseq_runs import (
    AD_DROP,
    Finished,
    Job,
    generate,
    hide_transformers,
    hydra,
    hypotheses,
    run,
    train,
    train_arguments,
)

pytestmark = pytest.mark.slow


def test_the_log_tells_drop_rates_and_shares(regularized: Finished) -> None:
    said = "ad_drop on 6 of 6 attentions of TransformerModel: *; p 0.4, q 0.5"
    assert regularized.output.count(said) == 1, "what is attached, once"
    assert " None" not in regularized.output.partition("begin training")[2]
    lines = regularized.lines()
    for line in lines:
        assert line["attn_reg/regularized"] == "1" and line["attn_reg/probe_fallbacks"] == "0"
        assert 0.2 < float(line["attn_reg/probe_share"]) < 0.9
        # p · q = 0.2 of the positions of long rows; n - int(0.6 n) of n rounds upwards
        assert 0.18 < float(line["attn_reg/drop_rate"]) < 0.45
        assert not any("drop_encoder" in name for name in line), "those of the sites, on request only"
    (epoch, _) = regularized.lines("train")
    assert epoch["train_attn_reg/regularized"] == "1" and 0.18 < float(epoch["train_attn_reg/drop_rate"]) < 0.45


def assert_trained(finished: Finished, shares: list[str | None]) -> None:
    lines = finished.check().lines()
    assert all(math.isfinite(float(line["loss"])) for line in lines)
    assert [line.get("attn_reg/regularized") for line in lines] == shares and lines[-1][
        "attn_reg/probe_fallbacks"
    ] == "0"


def test_half_precision_averaged_weights_and_accumulation(corpus: Path, tmp_path: Path) -> None:
    """16 batches of 60 tokens are 4 updates an epoch; every forward of an update is regularized alike."""
    flags = "--memory-efficient-fp16 --store-ema --ema-decay 0.9 --max-tokens 60 --update-freq 4 --max-update 4"
    cross_tuned = ["--ad-drop-cross-tuning", "update:1"]
    assert_trained(train(corpus, tmp_path, *AD_DROP, *shlex.split(flags), *cross_tuned), [None, "1", None, "1"])


def test_layerdrop_may_leave_out_any_layer(corpus: Path, tmp_path: Path) -> None:
    """Also every selected one at once, in the probe, in the forward or in both."""
    flags = shlex.split("--encoder-layerdrop 0.5 --decoder-layerdrop 0.2 --attn-sites encoder.self[1] --max-update 12")
    assert len(train(corpus, tmp_path, *AD_DROP, *flags).check().lines()) == 12
    assert len(hypotheses(generate(corpus, tmp_path / "checkpoint_last.pt"))) == 12


def test_alignments_are_learnt_beside_ad_drop(corpus: Path, tmp_path: Path) -> None:
    """transformer_align supervises the weights of one attention, which dropping would make log 0; the others may."""
    flags = shlex.split("--arch transformer_align --load-alignments --alignment-layer 1 --alignment-heads 2")
    flags += shlex.split("--criterion label_smoothed_cross_entropy_with_alignment --alignment-lambda 1 --lr 0.02")
    flags += ["--attn-sites", "encoder.self decoder.self decoder.cross[0]", "--max-update", "24"]
    finished = train(corpus, tmp_path, *AD_DROP, *flags)
    assert_trained(finished, ["1"] * 24)
    losses = [float(line["alignment_loss"]) for line in finished.lines()]
    assert 0.1 < losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("override", "shares"),
    [
        ("", [None, "1"]),
        (
            "task.ad_drop_cross_tuning=off task.attn_sites='encoder.self[0] decoder.cross' common.bf16=true "
            "common.memory_efficient_bf16=true",
            ["1", "1"],
        ),
        ("task.attn_reg=attend_out +task.attend_out_steps=2 common.bf16=true", ["1", "1"]),
    ],
)
def test_hydra_overrides(override: str, shares: list[str | None], corpus: Path, tmp_path: Path) -> None:
    words = [re.sub(r"^(task\.attn_sites)=(.*)$", r"\1='\2'", word) for word in shlex.split(override)]
    finished = run("hydra_train", hydra(corpus, tmp_path, *words), tmp_path / "train.log").check()
    assert [line.get("attn_reg/regularized") for line in finished.lines()] == shares
    if not override:
        assert not [name for name in finished.lines()[0] if name.startswith("attn_reg/")], "of a plain epoch"
        assert len(hypotheses(generate(corpus, tmp_path / "checkpoints" / "checkpoint_best.pt"))) == 12


def test_switches_written_in_yaml() -> None:
    """YAML reads a bare `off` as a boolean, and so may a user's `false`."""
    for switch, word in (("off", "false"), (False, False)):
        read = regularizer_from(Namespace(attn_reg="ad_drop", ad_drop_cross_tuning=switch, ad_drop_probe_dropout=word))
        assert (read.cross_tuning, read.probe_dropout) == ("off", False)


USER_DIR = """
    from fairseq.tasks import register_task
    from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

    from attn_reg_plugin.tasks import attn_reg_translation
    from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, with_attn_reg


    @register_task("my_lm", dataclass=with_attn_reg(LanguageModelingConfig))
    class MyLanguageModeling(AttnRegTask, LanguageModelingTask):
        "A task with a config dataclass."
"""


def test_a_language_model(corpus: Path, tmp_path: Path) -> None:
    """With a user dir of one's own beside ours, which it imports."""
    user_dir, data = tmp_path / "my_tasks_of_the_tests", tmp_path / "bin"
    user_dir.mkdir()
    (user_dir / "__init__.py").write_text(dedent(USER_DIR), encoding="utf-8")
    text = ["--only-source", "--trainpref", str(corpus.parent / "raw" / "train.en"), "--workers", "1"]
    run("preprocess", [*text, "--destdir", str(data)], tmp_path / "preprocess.log").check()
    model = shlex.split("--arch transformer_lm --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32")
    flags = shlex.split("--decoder-attention-heads 2 --tokens-per-sample 16 --max-update 3 --attn-rates-by-site")
    flags += [*AD_DROP, "--attn-sites", "decoder.self"]
    finished = train(data, tmp_path / "save", *flags, task="my_lm", model=model, user_dir=user_dir).check()
    assert {line["attn_reg/regularized"] for line in finished.lines()} == {"1"}
    assert "attn_reg/drop_decoder.self[1]" in finished.lines()[-1]
    scored = ["--user-dir", str(user_dir), "--path", str(tmp_path / "save" / "checkpoint_last.pt"), "--cpu"]
    scored += ["--gen-subset", "train", "--sample-break-mode", "eos", "--num-workers", "0", "--max-tokens", "400"]
    assert "Perplexity" in run("eval_lm", [str(data), *scored], tmp_path / "eval_lm.log").check().output


ROBERTA = shlex.split(
    "--arch roberta_base --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    "--encoder-attention-heads 2 --dropout 0.1 --attention-dropout 0.1 --max-positions 32"
)
OTHERS = ["--criterion", "--label-smoothing", "--disable-validation", "--max-tokens"]
SENTENCES = shlex.split(
    "--criterion sentence_prediction --classification-head-name head --init-token 0 --separator-token 2 "
    "--num-classes 2 --batch-size 8 --max-epoch 1"
)
SIZES = {"train": 32, "valid": 10}


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`input0` and `label`, as fairseq's RoBERTa recipes lay them out."""
    root, generator = tmp_path_factory.mktemp("sentences"), random.Random(5)
    for part, kinds, length in (("input0", 12, 4), ("label", 2, 1)):
        for split, size in SIZES.items():
            lines = [" ".join(str(generator.randrange(kinds)) for _ in range(length)) for _ in range(size)]
            (root / f"{split}.{part}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        prefixes = [text for split in SIZES for text in (f"--{split}pref", str(root / f"{split}.{part}"))]
        arguments = ["--only-source", "--workers", "1", "--destdir", str(root / "bin" / part), *prefixes]
        run("preprocess", arguments, root / f"{part}.log").check()
    return root / "bin"


def predict(data: Path, save: Path, *flags: str, **options: Any) -> Finished:
    options = {"task": "attn_reg_sentence_prediction", "model": ROBERTA, "without": OTHERS, **options}
    return train(data, save, *SENTENCES, *flags, **options).check()


def test_sentence_prediction(sentences: Path, tmp_path: Path) -> None:
    """An epoch of 4 updates is the stock task's, also its validation; the next one is regularized."""
    stock = predict(sentences, tmp_path / "stock", task="sentence_prediction", user_dir=None)
    ours = predict(sentences, tmp_path / "ours", "--attn-reg", "ad_drop", "--max-epoch", "2")
    assert [line.get("attn_reg/regularized") for line in ours.lines()] == [None] * 4 + ["1"] * 4
    assert ours.losses()[:4] == stock.losses()
    validations = [[line[f"valid_{name}"] for name in ("loss", "accuracy")] for line in ours.lines("valid")]
    assert validations[0] == [stock.lines("valid")[0][f"valid_{name}"] for name in ("loss", "accuracy")]
    assert validations[1] != validations[0]


def test_translation_trains_regularized_and_labelled_text_is_refused(corpus: Path, tmp_path: Path) -> None:
    arguments = train_arguments(corpus, tmp_path, *AD_DROP, "--max-update", "2")
    lines = Job("train", arguments, tmp_path / "log", hide_transformers).wait().check().lines()
    assert [line["attn_reg/regularized"] for line in lines] == ["1", "1"]
    (tmp_path / "train.tsv").write_text("text\tlabel\nyes\t1\nno\t0\n", encoding="utf-8")
    described = ["--text-columns", "text", "--label-column", "label", "--file-format", "tsv", "--hf-model", "a/name"]
    arguments = train_arguments(tmp_path, tmp_path / "run", *described, task="attn_reg_text_classification")
    done = Job("train", arguments, tmp_path / "log", hide_transformers).wait()
    assert done.status != 0 and "need transformers, which cannot be imported" in done.output
    assert "pip install '.[fairseq,hf]'" in done.output
