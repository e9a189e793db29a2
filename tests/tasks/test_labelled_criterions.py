"""Criterions of labelled data and R-Drop under the real `fairseq-train`, with one process and with two."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import f1_score as entity_f1
from sklearn.metrics import accuracy_score, matthews_corrcoef

from attn_reg_plugin.labelled import find_task
from tests.tasks.fairseq_runs import Finished, Job, finish_ranks, read_checkpoint, start_ranks, train, train_arguments
from tests.tasks.labelled_toy import WORDS, dataset, register

pytestmark = pytest.mark.slow

#: nothing is learned, so that the model is the same whoever trained it; the last of nine validation batches leaves one
#: of two processes with an empty one
STILL = shlex.split("--lr 1e-30 --max-epoch 1 --batch-size 8 --batch-size-valid 5 --weight-decay 0")
OWN = ["--criterion", "--label-smoothing", "--disable-validation", "--max-tokens"]
CASES = [
    ("cola", "attn_reg_classification", "mcc"),
    ("stsb", "attn_reg_classification_with_r_drop", "pearson_spearman"),
    ("wnut17", "attn_reg_tagging_with_r_drop", "f1"),
]


def toy(save: Path, ranks: int, row: str, criterion: str, metric: str, *flags: str) -> Finished:
    """A training on made-up data by one or two processes; the first one's end."""
    own = ["--criterion", criterion, "--row", row, *STILL, "--best-checkpoint-metric", metric]
    options = {"task": "labelled_toy", "model": ["--arch", "labelled_toy"], "without": OWN, "user_dir": None}
    arguments = train_arguments(None, save, *own, "--maximize-best-checkpoint-metric", *flags, **options)
    return finish_ranks(start_ranks(arguments, save / "rank", ranks, register))


def expected(row: str, checkpoint: Path) -> dict[str, float]:
    """The libraries' values on all predictions of the trained table of words."""
    table, task = read_checkpoint(checkpoint)["model"]["table.weight"], find_task(row)
    assert table.shape == (WORDS, max(1, len(task.labels)))
    rows = dataset(row, "valid").rows
    logits = [table[torch.from_numpy(example.input_ids).long()] for example in rows]
    if row == "wnut17":
        words = [example.label != -100 for example in rows]
        names = np.array(task.labels)
        gold = [names[example.label[some]].tolist() for example, some in zip(rows, words, strict=True)]
        predicted = [names[one.argmax(-1).numpy()[some]].tolist() for one, some in zip(logits, words, strict=True)]
        flat = [np.concatenate(side) for side in (gold, predicted)]
        return {"f1": 100 * entity_f1(gold, predicted), "accuracy": 100 * accuracy_score(*flat)}
    pooled, gold = torch.stack([one.mean(0) for one in logits]), [example.label for example in rows]
    if row == "stsb":
        values = pooled[:, 0].numpy()
        pearson, spearman = pearsonr(values, gold)[0], spearmanr(values, gold)[0]
        return {"pearson": 100 * pearson, "spearman": 100 * spearman, "pearson_spearman": 50 * (pearson + spearman)}
    found = pooled.argmax(-1).numpy()
    return {"mcc": 100 * matthews_corrcoef(gold, found), "accuracy": 100 * accuracy_score(gold, found)}


@pytest.mark.parametrize(("row", "criterion", "metric"), CASES)
def test_metrics_are_the_libraries_with_one_process_and_with_two(
    tmp_path: Path, row: str, criterion: str, metric: str
) -> None:
    for ranks in (1, 2):
        save = tmp_path / str(ranks)
        (line,) = toy(save, ranks, row, criterion, metric).lines("valid")
        values = expected(row, save / "checkpoint_best.pt")
        assert abs(values[metric]) > 0.5
        for name, value in values.items():
            assert float(line[f"valid_{name}"]) == pytest.approx(value, rel=1e-4, abs=1e-4), name
        best = read_checkpoint(save / "checkpoint_best.pt")["extra_state"]["best"]
        assert best == pytest.approx(values[metric], rel=1e-9, abs=1e-5)


def test_validate_gives_the_same_metrics(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint_best.pt"
    (trained,) = toy(tmp_path, 1, "stsb", "attn_reg_classification", "pearson").lines("valid")
    arguments = ["--task", "labelled_toy", "--row", "stsb", "--path", str(checkpoint), "--batch-size", "7", "--cpu"]
    arguments += shlex.split("--required-batch-size-multiple 1 --num-workers 0 --log-format json")
    finished = Job("validate", arguments, tmp_path / "validate.log", register).wait().check()
    for name in ("pearson", "spearman", "pearson_spearman", "loss"):
        assert f'"valid_{name}": "{trained[f"valid_{name}"]}"' in finished.output, finished.output[-2000:]


def test_the_divergence_is_logged_over_accumulated_batches(tmp_path: Path) -> None:
    flags = shlex.split("--lr 0.01 --update-freq 2 --batch-size 4 --max-epoch 2 --r-drop-alpha 2")
    finished = toy(tmp_path, 1, "cola", "attn_reg_classification_with_r_drop", "mcc", *flags)
    lines = finished.lines()
    assert len(lines) == 6 and all(float(line["r_drop"]) > 0 for line in lines)
    for line in lines:
        whole = 2 * float(line["nll_loss"]) + 2 * float(line["r_drop"])
        assert float(line["loss"]) == pytest.approx(whole, abs=2e-3)
    assert [line["bsz"] for line in lines] == ["8"] * 6
    assert len(finished.lines("valid")) == 2 and "valid_r_drop" not in finished.lines("valid")[0]


# -- translation ------------------------------------------------------------------------------------------------------

R_DROP = ["--criterion", "label_smoothed_cross_entropy_with_r_drop", "--r-drop-alpha", "3"]
BLEU = [
    *shlex.split("--eval-bleu --eval-bleu-print-samples --update-freq 2 --max-epoch 1 --eval-bleu-args"),
    '{"beam":1}',
]


def test_translation_with_bleu_and_accumulated_batches(corpus: Path, tmp_path: Path) -> None:
    finished = train(corpus, tmp_path, *R_DROP, *BLEU, without=["--criterion", "--disable-validation"]).check()
    lines = finished.lines()
    assert lines and all(float(line["r_drop"]) > 0 for line in lines)
    (valid,) = finished.lines("valid")
    assert float(valid["valid_bleu"]) >= 0 and "valid_r_drop" not in valid


def test_validation_of_translation_is_the_plain_criterions(corpus: Path, tmp_path: Path) -> None:
    still = ["--lr", "1e-30", "--max-epoch", "1"]
    without = ["--criterion", "--disable-validation"]
    ours = train(corpus, tmp_path / "ours", *R_DROP, *still, without=without).check()
    plain = ["--criterion", "label_smoothed_cross_entropy"]
    theirs = train(corpus, tmp_path / "theirs", *plain, *still, without=without).check()
    (mine,), (stock,) = ours.lines("valid"), theirs.lines("valid")
    for name in ("valid_loss", "valid_nll_loss", "valid_ppl"):
        assert mine[name] == stock[name]


@pytest.mark.parametrize(
    "flags",
    [
        "--attn-reg ad_drop --attn-sites * --ad-drop-cross-tuning off --ad-drop-labels gold --max-update 2",
        "--attn-reg attend_out --attn-sites * --attend-out-steps 2 --max-update 4 --update-freq 2",
    ],
)
def test_r_drop_trains_under_a_regularizer(corpus: Path, tmp_path: Path, flags: str) -> None:
    """The regularizer gets the repeated batch: gold labels, the generator's tokens and the defender's batch fit."""
    lines = train(corpus, tmp_path, *R_DROP, *shlex.split(flags), without=["--criterion"]).check().lines()
    assert lines and all(line["regularized"] == "1" and float(line["r_drop"]) > 0 for line in lines)
    dropped = [float(value) for name, value in lines[0].items() if name.startswith("drop_")]
    assert len(dropped) == 6 and all(0 < share < 1 for share in dropped)
