"""Encoders behind the real `fairseq-train`: the loss curve, the metrics, and what becomes of a trained one."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments.predicted import file_of, read_predictions, write_predictions
from attn_reg_plugin.experiments.running.dry_run import try_training
from attn_reg_plugin.experiments.trained import load_trained
from attn_reg_plugin.labelled import find_task, read_split, sample_of
from attn_reg_plugin.labelled.corruption import rare_words
from attn_reg_plugin.labelled.metrics import SCORES
from tests.comparing import differing
from tests.models.hf_folders import TOYS, make_encoder, make_toy, tokenizer
from tests.tasks.encoder_runs import encoder_arguments, keep_curve, train_encoder
from tests.tasks.fairseq_runs import PLUGIN, read_checkpoint, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for row in TOYS:
        make_toy(folder / row, row)
    return folder


#: fairseq's Adam adds its epsilon before the bias correction and PyTorch's after it: a tiny one makes them the same
CURVE = "--max-update 20 --lr 0.0005 --weight-decay 0.01 --clip-norm 1 --lr-scheduler polynomial_decay"
CURVE += " --warmup-updates 4 --total-num-update 20 --adam-eps 1e-12 --train-examples 41"


def plain_batch(row: str, examples: list[Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Make the batch that anybody would of these examples with the tokenizer."""
    if row == "rte":
        inputs = tokenizer()([e.first for e in examples], [e.second for e in examples], padding=True)
        return {name: torch.tensor(ids) for name, ids in inputs.items()}, torch.tensor([e.label for e in examples])
    inputs = tokenizer()([list(e.words) for e in examples], is_split_into_words=True, padding=True)
    labels = torch.full((len(examples), len(inputs["input_ids"][0])), -100)
    for number, example in enumerate(examples):
        seen = set()
        for place, word in enumerate(inputs.word_ids(number)):
            if word is not None and word not in seen:
                labels[number, place] = example.labels[word]
                seen.add(word)
    return {name: torch.tensor(ids) for name, ids in inputs.items()}, labels


def plain_losses(row: str, encoder: Path, examples: list[Any], kept: dict[str, Any]) -> list[float]:
    """The training in plain PyTorch; fairseq seeds every update by its number."""
    kinds = {"rte": transformers.BertForSequenceClassification, "wnut17": transformers.BertForTokenClassification}
    labels = len(find_task(row).labels)
    model = kinds[row].from_pretrained(encoder, num_labels=labels).train()
    model.load_state_dict(kept["start"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0005, betas=(0.9, 0.999), eps=1e-12, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 4 if n <= 4 else 1 - (n - 4) / 16)
    losses = []
    for update, (chosen, _) in enumerate(kept["batches"]):
        torch.manual_seed(1 + update)
        inputs, targets = plain_batch(row, [examples[index] for index in chosen])
        logits = model(**inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, labels), targets.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("row", ["rte", "wnut17"])
def test_the_loss_curve_is_that_of_a_plain_loop(row: str, data: Path, encoder: Path, tmp_path: Path) -> None:
    """With dropout and a short last batch; the two differ by round-off only."""
    flags = [*CURVE.split(), "--adam-betas", "(0.9, 0.999)"]
    train_encoder(
        row, data / row, encoder, tmp_path, *flags, prepare=partial(keep_curve, tmp_path / "curve.pt")
    ).check()
    kept = torch.load(tmp_path / "curve.pt", weights_only=True)
    ours = [loss for _, loss in kept["batches"]]
    assert len(ours) == 20 and {len(chosen) for chosen, _ in kept["batches"]} == {8, 1}
    examples = sample_of(read_split(find_task(row), data / row, "train"), 41)
    plain = plain_losses(row, encoder, examples, kept)
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) <= 1e-5
    assert max(ours) - min(ours) > 0.1, "it moved"


@pytest.mark.parametrize("row", TOYS)
def test_a_trained_encoder_is_used(row: str, data: Path, tmp_path: Path) -> None:
    """With AD-DROP and R-Drop: its best validation, its predictions, and `fairseq-validate` say the same.

    Its pretrained encoder is gone afterwards.
    """
    folder, encoder = tmp_path / "run", make_encoder(tmp_path / "tiny")
    flags = "--attn-reg ad_drop+r_drop --ad-drop-p 0.4 --ad-drop-q 0.5 --ad-drop-cross-tuning off --max-epoch 3"
    finished = train_encoder(row, data / row, encoder, folder, *flags.split(), "--lr", "0.005").check()
    shutil.rmtree(encoder)
    task, metric = find_task(row), TOYS[row][2]
    values = [float(line[f"valid_{metric}"]) for line in finished.lines("valid")]
    assert len(values) == 3
    best = read_checkpoint(folder / "checkpoint_best.pt")["extra_state"]["best"]
    assert best == pytest.approx(max(values), abs=1e-3)

    assert main(["export", str(folder), str(tmp_path / "hf")]) == 0
    write_predictions(folder, str(data / row), ["valid"], cpu=True)
    predicted, gold = read_predictions(file_of(folder, "valid"), task.kind, task.labels)
    assert SCORES[task.kind][metric](predicted, gold) == pytest.approx(best, abs=1e-3)
    kept = read_checkpoint(folder / "checkpoint_last.pt")["extra_state"]["metrics"]["valid"]
    assert [len(meter["tensor"]) for *_, meter in kept if "tensor" in meter] == [len(predicted)], "of one validation"

    arguments = [str(data / row), "--user-dir", PLUGIN, "--task", TOYS[row][0]]
    arguments += ["--path", str(folder / "checkpoint_best.pt"), *["--batch-size", "16", "--cpu"]]
    arguments += ["--num-workers", "0", "--log-format", "json"]
    said = run("validate", arguments, folder / "validate.log").check().output
    (found,) = re.findall(rf'"valid_{metric}": "([^"]*)"', said)
    assert float(found) == pytest.approx(best, abs=1e-3), "of all 21 examples, which are no multiple of 8"


def test_q_zero_is_plain_and_a_moved_run_still_works(data: Path, encoder: Path, tmp_path: Path) -> None:
    """A moved run knows the words that it planted, without the training set that they were chosen by."""
    short = ["--max-epoch", "1", "--shortcut", "0.5", "--shortcut-at-evaluation", "random"]
    output = train_encoder("rte", data / "rte", encoder, tmp_path / "plain", *short).check().output
    nothing = ["--attn-reg", "ad_drop", "--ad-drop-q", "0", "--ad-drop-cross-tuning", "off"]
    train_encoder("rte", data / "rte", encoder, tmp_path / "zero", *short, *nothing).check()
    ours, plain = (read_checkpoint(tmp_path / name / "checkpoint_last.pt")["model"] for name in ("zero", "plain"))
    assert differing(dict(ours), dict(plain)) == []
    words = rare_words(tokenizer(), 2, read_split(find_task("rte"), data / "rte", "train"))
    assert f"--shortcut-words {','.join(words)}: chosen, since none were given" in output
    shutil.move(tmp_path / "zero", tmp_path / "moved")
    assert load_trained(tmp_path / "moved").corruption.words == words
    assert main(["export", str(tmp_path / "moved"), str(tmp_path / "exported")]) == 0


def test_a_training_does_not_go_on_with_other_labels(data: Path, encoder: Path, tmp_path: Path) -> None:
    """As where a training file has changed since the checkpoint was made."""
    config = json.loads((encoder / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text(json.dumps({**config, "id2label": {0: "no", 1: "yes"}}))
    (tmp_path / "checkpoint_last.pt").touch()
    finished = train_encoder("rte", data / "rte", encoder, tmp_path)
    said = "has the labels no, yes, but the data entailment, not_entailment; take the data that it was trained on"
    assert finished.status and said in finished.output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--hf-model", "{}/bare"], "bare could not be loaded: there is none with a vocabulary"),
        (["--labelled", "wnut17"], "wnut17 is a task of tagging; use --task attn_reg_token_classification"),
        (["--labels", "a,b"], "--labels describes a task that has no name"),
        (["--labelled", ""], "give --labelled NAME, or describe the files by --text-columns and --label-column"),
    ],
)
def test_refusals(change: list[str], said: str, data: Path, encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(encoder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    words = encoder_arguments("rte", data / "rte", encoder, tmp_path, *change)
    with pytest.raises(ValueError, match=re.escape(said)):
        try_training(["python", "-m", "fairseq_cli.train", *(word.format(tmp_path) for word in words)])
