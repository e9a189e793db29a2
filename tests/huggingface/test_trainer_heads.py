"""Every task head that transformers puts on a model trains with AD-DROP and AttendOut: a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attn_reg_plugin.regularizers import AttendOut
from tests.backends.oracle_models import batch, tiny
from tests.huggingface.trainers import ad_drop, trainer_of

#: (head, model type, class) of the oracle; a head that answers with real numbers; the number of sites
HEADS = {
    "tokens": ("token", "bert", "BertForTokenClassification", 2),
    "answers": ("answer", "bert", "BertForQuestionAnswering", 2),
    "choices": ("choice", "bert", "BertForMultipleChoice", 2),
    "masked": ("masked", "roberta", "RobertaForMaskedLM", 2),
    "several": ("sequence", "bert", "BertForSequenceClassification", 2),
    "encoder_decoder": ("sequence", "bart", "BartForSequenceClassification", 6),
    "causal": ("sequence", "gpt2", "GPT2ForSequenceClassification", 2),
    "images": ("image", "vit", "ViTForImageClassification", 2),
}


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("method", [ad_drop(), AttendOut(steps=2, sites="*")], ids=lambda method: method.name)
def test_every_head_trains(tmp_path: Path, head: str, method: Any) -> None:
    kind, *pair, sites = HEADS[head]
    model = tiny(kind, *pair)
    inputs = batch(kind, model)
    if head == "several":
        model.config.problem_type, inputs["labels"] = "multi_label_classification", torch.eye(3)
    examples = [{name: value[i] for name, value in inputs.items()} for i in range(3)] * 4
    own = {"train_dataset": examples, "eval_dataset": examples[:5], "data_collator": stacked}
    quiet = {"max_steps": 2, "per_device_train_batch_size": 3, "logging_steps": 2, "remove_unused_columns": False}
    trainer = trainer_of(tmp_path, "bert", method, model, own=own, rates_by_site=True, **quiet)
    if head == "images" and isinstance(method, AttendOut):
        with pytest.raises(ValueError, match="no embedding found for the encoder of ViTForImageClassification"):
            trainer.train()
        return
    trainer.train()
    log = trainer.state.log_history[0]
    rates = [value for key, value in log.items() if key.startswith("attn_reg/drop_") and "[" in key]
    assert len(rates) == sites and all(0 < rate < 1 for rate in rates) and log["loss"] > 0
    assert ("attn_reg/attacker_won" in log) == isinstance(method, AttendOut)
