"""`--arch hf_encoder --hf-model PATH_OR_NAME`: an encoder of Hugging Face's behind fairseq's trainer.

The model is transformers' own class with its own head, kept as it is under `model`: sequence classification (also
regression), token classification or multiple choice, as the task's kind of labels asks for; with `--pooling mean` a
hook hands this head the mean of the tokens in place of the first. A checkpoint holds the model's configuration in its
`cfg.model.hf_config`, so reading one needs no pretrained weights.
"""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field, and knows `Optional` only
# ruff: noqa: UP045
import importlib
import inspect
import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from torch import Tensor, nn

from attn_reg_plugin.checkpoints import WEIGHTS
from attn_reg_plugin.configuration import setting
from attn_reg_plugin.files import reason_of
from attn_reg_plugin.labelled.task_table import CLASSIFICATION, MULTIPLE_CHOICE, REGRESSION, TAGGING, LabelledTask
from attn_reg_plugin.regularizers.base.outputs import logits_of

if TYPE_CHECKING:  # fairseq loads this file with every --user-dir, and translation does not need transformers
    from transformers import PreTrainedConfig, PreTrainedModel

#: kind of task -> the name of transformers' class with the head for it
HEADS = {
    CLASSIFICATION: "AutoModelForSequenceClassification",
    REGRESSION: "AutoModelForSequenceClassification",
    TAGGING: "AutoModelForTokenClassification",
    MULTIPLE_CHOICE: "AutoModelForMultipleChoice",
}
#: how transformers calls the loss of a kind; the loss is our criterion's, but an exported model says what it is for
PROBLEMS = {CLASSIFICATION: "single_label_classification", REGRESSION: "regression"}
#: a flag, and what families call the same in their configurations
DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "dropout", "mlp_dropout", "embedding_dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout"),
    "classifier_dropout": ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout"),
}

#: families whose heads read the first token of the last hidden states, or what the pooler makes of it
POOLING = {"bert", "camembert", "deberta-v2", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"}


@dataclass
class HFEncoderConfig(FairseqDataclass):
    """The flags of the architecture; `--hf-model` is the task's, whose tokenizer comes from there too."""

    hf_from_config: bool = setting("random weights of the shape that --hf-model has, not the pretrained ones", False)
    dropout: Optional[float] = setting("dropout of the hidden states, in [0, 1); default: the model's", None)
    attention_dropout: Optional[float] = setting(
        "dropout of the attention weights, in [0, 1); default: the model's", None
    )
    classifier_dropout: Optional[float] = setting("dropout before the head, in [0, 1); default: the model's", None)
    pooling: str = setting("what the head reads, first: the first token; mean: the mean of all tokens", "first")
    checkpoint_activations: bool = setting("compute activations again in the backward pass, to save memory", False)
    autocast: str = setting("bfloat16: matrix products in bf16, weights and loss in fp32; off: all in fp32", "off")
    hf_config: Optional[str] = setting("not to be given: where a checkpoint keeps the model's configuration", None)


@register_model("hf_encoder", dataclass=HFEncoderConfig)
class HFEncoderModel(BaseFairseqModel):
    """An encoder with a head.

    Attributes:
        model: the transformers model.
        autocast: the dtype that its forward runs in by `torch.autocast`; None: as it is.
        mean_pooled: whether the head reads the mean of the tokens, which `save_pretrained` does not know.
    """

    def __init__(self, model: "PreTrainedModel", autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast
        named = inspect.signature(model.forward).parameters
        types = getattr(model.config, "type_vocab_size", 0) or 0
        self.takes_types = "token_type_ids" in named and types > 1
        self.mean_pooled = getattr(model.config, "pooling", None) == "mean"
        if self.mean_pooled:
            model.base_model.pooler = None
            model.base_model.register_forward_hook(_mean_as_first_token, with_kwargs=True)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "HFEncoderModel":
        """Build the model for a task with an attribute `labelled`, a `LabelledTask`, and `--hf-model` in its `cfg`."""
        labelled, autocast = getattr(task, "labelled", None), autocast_dtype(cfg)
        if not isinstance(labelled, LabelledTask):
            who = type(task).__name__
            raise ValueError(f"--arch hf_encoder is for tasks such as attn_reg_text_classification, not for {who}")
        if cfg.hf_config:
            config = config_from_json(cfg.hf_config)
            check_labels(config, labelled)
            model = build_head(config, labelled.kind)
        else:
            config = load_config(task.cfg.hf_model)
            describe_labels(config, labelled)
            for flag in DROPOUTS:
                set_dropout(config, flag, getattr(cfg, flag, None))
            set_pooling(config, cfg.pooling, labelled.kind)
            model = build_head(config, labelled.kind, None if cfg.hf_from_config else task.cfg.hf_model)
        if cfg.checkpoint_activations:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if autocast and model.config.model_type == "deberta":
            raise ValueError("--autocast bfloat16: transformers' DeBERTa of version 1 does not run in autocast")
        return cls(model, autocast)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Run the model on input_ids int64 (B, T), of multiple choice (B, choices, T), as the other two.

        Returns:
            `logits`: (B, number of labels), (B, 1) of a regression, (B, choices), or (B, T, number of labels).
        """
        types = {"token_type_ids": token_type_ids} if self.takes_types and token_type_ids is not None else {}
        # no cache: fairseq's own disabled autocast around a step would keep it from one forward to the next
        kind = input_ids.device.type
        with torch.autocast(kind, self.autocast, cache_enabled=False) if self.autocast else nullcontext():
            logits = self.model(input_ids=input_ids, attention_mask=attention_mask, **types).logits
        return {"logits": logits.float() if self.autocast else logits}

    def half(self) -> "HFEncoderModel":
        """Put the weights into fp16, but not under --autocast, which wants them in fp32."""
        if self.autocast:
            raise ValueError("--autocast bfloat16 keeps the weights in fp32: give either --autocast or --fp16")
        return super().half()

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        """Return (log-)probabilities of the labels, in fp32."""
        logits = logits_of(net_output).float()
        return logits.log_softmax(-1) if log_probs else logits.softmax(-1)

    def config_json(self) -> str:
        """Write the transformers model's configuration."""
        return self.model.config.to_json_string(use_diff=False)


def autocast_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype that `--autocast` asks for in a model's configuration; None for `off`."""
    if config.autocast not in ("off", False, "False", "bfloat16"):  # YAML reads a bare `off` as False
        raise ValueError(f"--autocast is {config.autocast!r}, but must be one of off, bfloat16")
    return torch.bfloat16 if config.autocast == "bfloat16" else None


def _transformers() -> Any:
    """Import the package, or refuse to go on without it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"tasks of labelled text and --arch hf_encoder need transformers, which cannot be imported ({error}); "
            "in the checkout of this package, pip install '.[fairseq,hf]' brings it"
        ) from error


def load_config(path: str) -> "PreTrainedConfig":
    """Load the configuration of a pretrained model from a folder or by its name on the hub; a ValueError if none is."""
    if not path:
        raise ValueError("--arch hf_encoder needs --hf-model: a folder, or a name on the Hugging Face hub")
    if ("/" in path or path.startswith(".")) and path.count("/") != 1 and not Path(path).is_dir():
        raise ValueError(f"--hf-model: there is no folder {path}")
    try:
        return _transformers().AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"--hf-model {path}: neither a folder of a model nor a name that the hub gives ({reason_of(error)})"
        ) from error


def config_from_json(text: str) -> "PreTrainedConfig":
    """Make the configuration that a checkpoint holds."""
    values = json.loads(text)
    return _transformers().AutoConfig.for_model(values.pop("model_type"), **values)


def describe_labels(config: "PreTrainedConfig", task: LabelledTask) -> None:
    """Write the task's labels into a configuration, where the head's size is read from."""
    if task.kind == REGRESSION:
        config.num_labels = 1
    elif task.kind != MULTIPLE_CHOICE:  # which has one output a choice
        config.id2label = dict(enumerate(task.labels or ()))
        config.label2id = {label: index for index, label in config.id2label.items()}
    config.problem_type = PROBLEMS.get(task.kind)


def labels_of(config: "PreTrainedConfig") -> tuple[str, ...]:
    """Return the labels of a model with a head, in the order of its outputs."""
    return tuple(config.id2label[index] for index in range(config.num_labels))


def check_labels(config: "PreTrainedConfig", task: LabelledTask) -> None:
    """Refuse, by a ValueError, data whose labels are not those that a model was trained with, in their order."""
    known = labels_of(config)
    if task.kind in (CLASSIFICATION, TAGGING) and known != task.labels:
        raise ValueError(
            f"the checkpoint's model has the labels {', '.join(known)}, but the data {', '.join(task.labels or ())}; "
            "take the data that it was trained on, or give its --labels, in this order"
        )


def set_dropout(config: "PreTrainedConfig", flag: str, value: float | None) -> None:
    """Set a dropout in [0, 1) under the names that the model's family has for it; None leaves the model's."""
    if value is None:
        return
    given, names = f"--{flag.replace('_', '-')} is {value}", [name for name in DROPOUTS[flag] if hasattr(config, name)]
    if not 0 <= value < 1:
        raise ValueError(f"{given}, but must be in [0, 1)")
    if not names:
        raise ValueError(f"{given}, but {config.model_type} has no such dropout")
    for name in names:
        setattr(config, name, value)


def set_pooling(config: "PreTrainedConfig", pooling: str, kind: str) -> None:
    """Write the pooling into a configuration, which a checkpoint keeps; a ValueError where it has no place."""
    if pooling not in ("first", "mean"):
        raise ValueError(f"--pooling is {pooling!r}, but must be one of first, mean")
    if pooling == "mean" and (config.model_type not in POOLING or kind == TAGGING):
        raise ValueError(f"--pooling mean is not for {kind.replace('_', ' ')} with {config.model_type} models")
    if pooling == "mean" or hasattr(config, "pooling"):  # which the encoder of an earlier training may have
        config.pooling = pooling


def _mean_as_first_token(base: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> Any:
    """Put the mean over the tokens (B, width), without padding, where heads read the first token."""
    hidden, mask = output.last_hidden_state, inputs.get("attention_mask")
    weights = torch.ones_like(hidden[..., :1]) if mask is None else mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weights).sum(1) / weights.sum(1)
    changed = {"last_hidden_state": torch.cat([mean.unsqueeze(1), hidden[:, 1:]], 1)}
    changed |= {"pooler_output": mean} if hasattr(output, "pooler_output") else {}
    return type(output)(**{**output, **changed})


def build_head(config: "PreTrainedConfig", kind: str, weights: str | None = None) -> "PreTrainedModel":
    """Build a model of `config` with the head for a kind of task, in fp32.

    Args:
        weights: folder or hub name of pretrained weights; a head of another size there is left out. None: random.

    Raises:
        ValueError: transformers has no such head for the model, or the weights cannot be read.
    """
    head = getattr(_transformers(), HEADS[kind])
    if type(config) not in head._model_mapping:
        raise ValueError(f"transformers has no {kind.replace('_', ' ')} head for {config.model_type} models")
    if weights is None:
        return head.from_config(config, dtype=torch.float32)
    try:
        return head.from_pretrained(weights, config=config, dtype=torch.float32, ignore_mismatched_sizes=True)
    except Exception as error:  # safetensors, torch and pickle have their own for a damaged file
        raise ValueError(
            f"--hf-model {weights}: its weights{_files_of(weights)} cannot be read ({reason_of(error)}); "
            "--hf-from-config would start from random ones"
        ) from error


def _files_of(folder: str) -> str:
    """Name the files of weights in a folder; nothing of a name on the hub."""
    names = sorted(path.name for pattern in WEIGHTS for path in Path(folder).glob(pattern))
    return f" ({', '.join(names)})" if names else ""
