"""Every task head that transformers puts on a model trains with AD-DROP and AttendOut: a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainingArguments

from attn_reg_plugin.huggingface import AttnRegCallback
from attn_reg_plugin.regularizers import AttendOut
from tests.backends.huggingface_models import _ENCODER, _TRANSLATOR, FAMILIES, WORDS
from tests.huggingface.trainers import ad_drop

T = 6
#: head, configuration, the shape of an example's labels and how many there are (0: real numbers)
HEADS: dict[str, tuple[str, str, dict[str, Any], dict[str, tuple[tuple[int, ...], int]]]] = {
    "tokens": ("BertForTokenClassification", "BertConfig", _ENCODER, {"labels": ((T,), 3)}),
    "answers": (
        "BertForQuestionAnswering",
        "BertConfig",
        {**_ENCODER, "num_labels": 2},
        {"start_positions": ((), T), "end_positions": ((), T)},
    ),
    "choices": ("BertForMultipleChoice", "BertConfig", _ENCODER, {"labels": ((), 2)}),
    "masked": ("RobertaForMaskedLM", "RobertaConfig", _ENCODER, {"labels": ((T,), WORDS)}),
    "several": (
        "BertForSequenceClassification",
        "BertConfig",
        {**_ENCODER, "problem_type": "multi_label_classification"},
        {"labels": ((3,), 0)},
    ),
    "encoder_decoder": (
        "BartForSequenceClassification",
        "BartConfig",
        {**_TRANSLATOR, "num_labels": 3},
        {"labels": ((), 3)},
    ),
    "causal": (
        "GPT2ForSequenceClassification",
        "GPT2Config",
        {**FAMILIES["gpt2"].options, "num_labels": 3},
        {"labels": ((), 3)},
    ),
}


def examples(head: str, size: int = 12) -> list[dict[str, Tensor]]:
    """Token ids that end with one end-of-sentence token, and labels."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, T) if head == "choices" else (T,)
    made = []
    for _ in range(size):
        ids = torch.randint(4, WORDS, shape, generator=generator)
        ids[..., -1] = 2
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name, (form, classes) in HEADS[head][3].items():
            values = torch.randint(max(classes, 2), form, generator=generator)
            example[name] = values if classes else values.float()
        made.append(example)
    return made


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("method", ["ad_drop", "attend_out"])
def test_every_head_trains(tmp_path: Path, head: str, method: str) -> None:
    kind, config, options, _ = HEADS[head]
    torch.manual_seed(1)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options))
    regularizer = ad_drop() if method == "ad_drop" else AttendOut(steps=2, sites="*")
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 2}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(str(tmp_path), max_steps=2, per_device_train_batch_size=3, **quiet),
        train_dataset=examples(head),
        eval_dataset=examples(head, 5),
        data_collator=stacked,
        callbacks=[AttnRegCallback(regularizer)],
    )
    trainer.train()
    log = trainer.state.log_history[0]
    rates = [value for key, value in log.items() if key.startswith("drop_")]
    assert len(rates) == (6 if head == "encoder_decoder" else 2) and all(0 < rate < 1 for rate in rates)
    assert ("attacker_won" in log) == (method == "attend_out") and log["loss"] > 0


def test_a_model_without_tokens(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **sizes))
    images = [{"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(i % 2)} for i in range(6)]
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    for regularizer in (ad_drop(), AttendOut(steps=2)):
        trainer = Trainer(
            model=model,
            args=TrainingArguments(str(tmp_path), max_steps=1, remove_unused_columns=False, **quiet),
            train_dataset=images,
            eval_dataset=images,
            data_collator=stacked,
            callbacks=[AttnRegCallback(regularizer)],
        )
        if isinstance(regularizer, AttendOut):
            with pytest.raises(ValueError, match="no embedding found for the encoder of ViTForImageClassification"):
                trainer.train()
        else:
            trainer.train()
            assert 0 < trainer.state.log_history[0]["drop_encoder.self[1]"] < 1
