"""Tasks in this process: R-Drop's loss, what is logged, how long a training is."""

import math
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.distributed.utils import all_reduce_dict

from attn_reg_plugin.tasks.fairseq_settings import total_epochs, total_updates
from attn_reg_plugin.tasks.labelled_task import AttnRegTextClassificationTask
from tests.backends.fairseq_models import transformer, words
from tests.models.hf_folders import tokenizer
from tests.tasks.fairseq_runs import train
from tests.tasks.tasks_in_process import (
    PROGRESS,
    GivenModel,
    Regularized,
    RegularizedOlder,
    attached,
    criterion,
    sample,
    step,
)


def test_a_repeated_batch_is_counted_once() -> None:
    model, batch = transformer(dropout=0.3), sample()
    _, log = step(attached(model, attn_reg="r_drop"), model, batch)
    assert log["ntokens"] == log["sample_size"] == batch["ntokens"] and log["nsentences"] == 3
    assert batch["target"].shape == (3, 6), "the sample stays as it is"
    assert float(log["attn_reg/r_drop_divergence"]) > 0.1


@pytest.mark.slow
def test_accumulated_batches_bleu_and_validation(corpus: Path, tmp_path: Path) -> None:
    """Losses are logged of one pass, and in base 2; validation is the plain criterion's."""
    flags = shlex.split("--lr 1e-30 --label-smoothing 0 --update-freq 2 --max-epoch 1 --eval-bleu --eval-bleu-args")
    flags += ['{"beam":1}']
    r_drop = ["--attn-reg", "r_drop", "--r-drop-weight", "3", "--tensorboard-logdir", str(tmp_path / "board")]
    ours = train(corpus, tmp_path / "ours", *flags, *r_drop, without=["--disable-validation"]).check()
    plain = train(corpus, tmp_path / "plain", *flags, without=["--disable-validation"]).check()
    assert len(ours.lines()) == 3
    assert b"attn_reg/r_drop" in b"".join(path.read_bytes() for path in (tmp_path / "board").rglob("*tfevents*"))
    for line in ours.lines():
        assert float(line["attn_reg/r_drop"]) > 0
        assert float(line["loss"]) == pytest.approx(float(line["nll_loss"]), abs=5e-3)
    (mine,), (stock,) = ours.lines("valid"), plain.lines("valid")
    for name in ("valid_loss", "valid_nll_loss", "valid_ppl", "valid_bleu"):
        assert mine[name] == stock[name]


@pytest.mark.parametrize("theirs", [False, True])
def test_a_training_counts_the_batches_of_its_own_first_epoch(
    theirs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are those of the checkpoint where a training goes on, but not where it starts from another's."""
    restored = tmp_path / "other" / "checkpoint_last.pt" if theirs else "checkpoint_last.pt"
    task = attached(transformer(), attn_save_dir=str(tmp_path), attn_restore_file=str(restored))
    monkeypatch.setattr(task, "continue_from", lambda *_: [None, 99])
    task._prepare(task.regularizer.model, criterion(), None, 1)
    assert task.state_dict().get("attn_reg_first_epoch") == (None if theirs else 99)


def test_language_codes_are_special(monkeypatch: pytest.MonkeyPatch) -> None:
    task, dictionary = attached(transformer()), words()
    codes = {dictionary.add_symbol(code) for code in ("__ro__", "__zh-CN__", "[en_XX]", ">>fra<<")}
    dictionary.add_symbol("[a b]")
    monkeypatch.setattr(type(task), "source_dictionary", dictionary)
    assert task.special_ids == {dictionary.bos(), dictionary.eos(), dictionary.pad(), *codes}
    labelled = AttnRegTextClassificationTask.__new__(AttnRegTextClassificationTask)
    labelled.tokenizer = tokenizer()
    expected = {"[PAD]", "[CLS]", "[SEP]"}
    assert set(labelled.tokenizer.convert_ids_to_tokens(sorted(labelled.special_ids))) == expected


def test_an_option_has_an_effect() -> None:
    losses = []
    for options in (
        {},
        {"ad_drop_attribution": "integrated", "ad_drop_integrated_path": "joint"},
        {"ad_drop_attribution": "integrated"},
        {"ad_drop_attribution": "attention"},
        {"ad_drop_labels": "gold"},
        {"ad_drop_probe_dtype": "bfloat16"},
        {"attn_sites": "decoder.cross"},
    ):
        model = transformer(dropout=0.1)
        loss, log = step(attached(model, **{"attn_sites": "*", "ad_drop_p": 0.3, **options}), model, sample(rows=24))
        assert log["attn_reg/regularized"] == 1 and log["attn_reg/fallbacks"] == 0 and math.isfinite(loss)
        losses.append(loss)
    assert losses[0] not in losses[1:]


def logged(layerdrop: float, loss: Any = None, **flags: Any) -> dict[str, Any]:
    """Return what a step logs of the method; with a layerdrop of 1 no layer of the encoder is called."""
    model = transformer(encoder_layerdrop=layerdrop)
    task = attached(model, attn_sites="encoder.self decoder.cross", **flags)
    log = step(task, model, {**sample(), "id": torch.arange(3)}, loss)[1]
    return {key: value for key, value in log.items() if key.startswith("attn_reg/")}


@pytest.mark.parametrize(
    "flags", [{}, {"attn_reg": "scheduled_dropout", "scheduled_dropout_schedule": "drop encoder.self: 0:0.3"}]
)
def test_its_sums_are_of_one_kind_whichever_there_are(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq adds up numbers in one buffer and tensors in another one: both must be as long on every rank."""
    lengths: list[list[int]] = []
    monkeypatch.setattr(
        "fairseq.distributed.utils.all_reduce", lambda buffer, group: lengths[-1].append(buffer.numel())
    )
    logs = [logged(layerdrop, **flags) for layerdrop in (0.0, 1.0)]
    for log in logs:
        lengths.append([])
        all_reduce_dict(log, torch.device("cpu"), None)
    assert list(logs[0]) == list(logs[1]) and lengths[0] == lengths[1] == [len(logs[0])]
    assert {value.dtype for log in logs for value in log.values()} == {torch.float64}
    assert logs[0] != logs[1], "the layers were left out"


def test_what_is_not_added_up_by_buffers_stays_small() -> None:
    """Criterions' outputs are gathered, as pickles of at most 16 KiB: a tensor's takes 300 bytes."""
    loss = criterion()
    loss.logging_outputs_can_be_summed = lambda: False
    for layerdrop in (0.0, 1.0):
        log = logged(layerdrop, loss)
        assert type(log["attn_reg/forwards"]) is type(log["attn_reg/dropped/encoder.self[0]"]) is float


@pytest.mark.parametrize(
    ("flags", "batches", "updates", "epochs"),
    [
        ({}, 7, None, None),
        ({"max_update": "20"}, None, 20, None),
        ({"max_epoch": "3"}, 7, 21, 3),
        ({"max_epoch": "3"}, None, None, 3),
        ({"max_epoch": 3, "max_update": 20}, 7, 20, 3),
        ({"max_epoch": 3, "max_update": 200, "update_freq": [2]}, 7, 12, 3),
        ({"max_epoch": 3, "update_freq": [2], "skip_remainder_batch": "True"}, 7, 9, 3),
        ({"max_epoch": 2, "update_freq": [1, 4], "skip_remainder_batch": "True"}, 8, 7 + 1, 2),
        ({"max_epoch": 4, "update_freq": "[4, 1]"}, 7, 2 + 7 + 7 + 7, 4),
        ({"max_epoch": 1, "update_freq": [4, 1]}, 7, 2, 1),
        ({"max_epoch": "${optimization.max_epoch}"}, 7, None, None),
        # a training that ends in its first epoch has one
        ({"max_update": 7}, 7, 7, 1),
        ({"max_update": 8}, 7, 8, None),
        ({"max_update": 7}, None, 7, None),
        ({"max_update": 3, "max_epoch": 5}, 7, 3, 1),
        ({"max_update": 7, "max_epoch": 5, "update_freq": [2]}, 7, 7, 5),
    ],
)
def test_what_comes_first_ends_it(
    flags: dict[str, Any], batches: int | None, updates: int | None, epochs: int | None
) -> None:
    """A task with a config dataclass sees them as `attn_NAME`, another one as they are."""
    config = SimpleNamespace(**{f"attn_{name}": value for name, value in flags.items()})
    assert (total_updates(config, batches), total_epochs(config, batches)) == (updates, epochs)
    if "$" not in str(flags):
        older = SimpleNamespace(**flags)
        assert (total_updates(older, batches), total_epochs(older, batches)) == (updates, epochs)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (Regularized, {"attn_max_update": 8}),
        (RegularizedOlder, {"max_update": 8, "max_epoch": 0, "update_freq": [1]}),
        *(
            (Regularized, {"data": data, "attn_max_epoch": 4, **more})
            for data in ("a", "a:b")
            for more in ({}, {"attn_max_update": 28})
        ),
    ],
)
def test_the_task_announces_it(kind: type, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From flags, or from the first epoch; with data in several parts, every epoch is taken to be as long."""
    task, listed = attached(transformer(), kind, **PROGRESS, **flags), "data" in flags
    if listed:  # a training set that is its iterator
        monkeypatch.setattr(GivenModel, "get_batch_iterator", lambda self, dataset, **_: dataset, raising=False)
        task.datasets = {"train": [None] * 7}
        task.get_batch_iterator(task.datasets["train"])
    step(task, task.regularizer.model, sample())
    task.regularizer.begin_update(7 if listed else 2)
    assert task.regularizer.drop_probability() == pytest.approx(0.2)
    assert not listed or (not task._iterators and task.state_dict()["attn_reg_first_epoch"] == 7)
