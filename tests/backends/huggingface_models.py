"""Tiny transformers models of every supported family, with random weights, and batches for them: a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from attn_reg_plugin.attention.sites import AttentionSite

WORDS, WIDTH, HEADS, LAYERS, PAD, CLASSES = 90, 32, 4, 2, 1, 3

_ENCODER = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
    "num_labels": CLASSES,
}
_TRANSLATOR = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
_DROPOUT_ENCODER = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_DROPOUT_TRANSLATOR = ("dropout", "attention_dropout", "activation_dropout")


@dataclass(frozen=True)
class Family:
    """One row: how a tiny model is made, and which sites it has.

    Attributes:
        model: class in transformers.
        config: class in transformers.
        options: of the configuration.
        dropouts: the names of its dropout options.
        stacks: `encoder`, `decoder` or `both`.
        checkpointing: whether transformers can checkpoint it, and its attention runs once in a forward.
        interface: whether its attention calls transformers' attention interface, else it is an ordinary module.
    """

    model: str
    config: str
    options: dict[str, Any]
    dropouts: tuple[str, ...]
    stacks: str = "encoder"
    checkpointing: bool = True
    interface: bool = True

    @property
    def sites(self) -> list[str]:
        """The names of all sites, in the order of the model's modules."""
        encoder = [f"encoder.self[{layer}]" for layer in range(LAYERS)]
        if self.stacks == "encoder":
            return encoder
        if self.stacks == "decoder":
            return [f"decoder.self[{layer}]" for layer in range(LAYERS)]
        return encoder + [f"decoder.{kind}[{layer}]" for layer in range(LAYERS) for kind in ("self", "cross")]


FAMILIES = {
    "bert": Family("BertForSequenceClassification", "BertConfig", _ENCODER, _DROPOUT_ENCODER),
    "roberta": Family("RobertaForSequenceClassification", "RobertaConfig", _ENCODER, _DROPOUT_ENCODER),
    "electra": Family(
        "ElectraForSequenceClassification", "ElectraConfig", {**_ENCODER, "embedding_size": 16}, _DROPOUT_ENCODER
    ),
    "distilbert": Family(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {
            "vocab_size": WORDS,
            "dim": WIDTH,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": 48,
            "max_position_embeddings": 40,
            "pad_token_id": PAD,
            "num_labels": CLASSES,
        },
        ("dropout", "attention_dropout", "seq_classif_dropout"),
    ),
    "xlm_roberta": Family("XLMRobertaForTokenClassification", "XLMRobertaConfig", _ENCODER, _DROPOUT_ENCODER),
    "albert": Family(
        "AlbertForSequenceClassification",
        "AlbertConfig",
        {**_ENCODER, "embedding_size": 16},
        (*_DROPOUT_ENCODER, "classifier_dropout_prob"),
        checkpointing=False,
    ),
    "modernbert": Family(
        "ModernBertForTokenClassification",
        "ModernBertConfig",
        {
            **_ENCODER,
            "cls_token_id": 0,
            "bos_token_id": 0,
            "sep_token_id": 2,
            "eos_token_id": 2,
            "local_attention": 4,
            "global_attn_every_n_layers": 2,
        },
        ("attention_dropout", "mlp_dropout", "embedding_dropout"),
    ),
    "marian": Family(
        "MarianMTModel", "MarianConfig", {**_TRANSLATOR, "decoder_start_token_id": PAD}, _DROPOUT_TRANSLATOR, "both"
    ),
    "bart": Family("BartForConditionalGeneration", "BartConfig", _TRANSLATOR, _DROPOUT_TRANSLATOR, "both"),
    "mbart": Family("MBartForConditionalGeneration", "MBartConfig", _TRANSLATOR, _DROPOUT_TRANSLATOR, "both"),
    "m2m_100": Family("M2M100ForConditionalGeneration", "M2M100Config", _TRANSLATOR, _DROPOUT_TRANSLATOR, "both"),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": WORDS,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "pad_token_id": PAD,
            "eos_token_id": 2,
            "decoder_start_token_id": PAD,
        },
        ("dropout_rate",),
        "both",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": WORDS,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 40,
            "pad_token_id": PAD,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "decoder",
    ),
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_ENCODER, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 2},
        ("attention_dropout",),
        "decoder",
    ),
    "deberta": Family(
        "DebertaForTokenClassification",
        "DebertaConfig",
        {**_ENCODER, **_DISENTANGLED},
        _DROPOUT_ENCODER,
        interface=False,
    ),
    "deberta_v3": Family(
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {**_ENCODER, **_DISENTANGLED, "position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        _DROPOUT_ENCODER,
        interface=False,
    ),
    "mpnet": Family(
        "MPNetForSequenceClassification",
        "MPNetConfig",
        {**_ENCODER, "bos_token_id": 0, "eos_token_id": 2},
        _DROPOUT_ENCODER,
        checkpointing=False,
        interface=False,
    ),
    "xlnet": Family(
        "XLNetForTokenClassification",
        "XLNetConfig",
        {
            "vocab_size": WORDS,
            "d_model": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "d_inner": 48,
            "pad_token_id": PAD,
            "num_labels": CLASSES,
        },
        ("dropout",),
        checkpointing=False,
        interface=False,
    ),
    "roformer": Family("RoFormerForTokenClassification", "RoFormerConfig", _ENCODER, _DROPOUT_ENCODER, interface=False),
    "mvp": Family(
        "MvpForConditionalGeneration", "MvpConfig", _TRANSLATOR, _DROPOUT_TRANSLATOR, "both", interface=False
    ),
    "longformer": Family(
        "LongformerForSequenceClassification",
        "LongformerConfig",
        {**_ENCODER, "attention_window": 4, "sep_token_id": 2},
        _DROPOUT_ENCODER,
        checkpointing=False,
        interface=False,
    ),
}
#: those whose attention can be called sdpa and eager: the others have one form
INTERFACE = [name for name, family in FAMILIES.items() if family.interface]
FORMS = [(name, form) for form in ("sdpa", "eager") for name in (FAMILIES if form == "sdpa" else INTERFACE)]


class Around(nn.Module):
    """A module of one's own around a transformers model, with its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        return self.model(**inputs)


def build(name: str, dropout: float = 0.0, seed: int = 1, attention: str = "sdpa", **options: Any) -> nn.Module:
    """A model of the family `name` in training mode, its attention maps made sharp: far from uniform."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    dropouts = dict.fromkeys(family.dropouts, dropout)
    config = getattr(transformers, family.config)(**{**family.options, **dropouts, **options})
    form = {"attn_implementation": attention} if family.interface else {}
    model = getattr(transformers, family.model)._from_config(config, **form)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() in (2, 3):
                parameter.normal_(std=0.3)
                if parameter.size(0) == WORDS or parameter.size(0) == WORDS + 2:
                    parameter[PAD].zero_()
    return model.train()


def ids(lengths: list[int], size: int, seed: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids (B, size) that are no special token, and their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, WORDS, (len(lengths), size), generator=generator)
    places = torch.arange(size)
    sizes = torch.tensor(lengths).unsqueeze(-1)
    real = places >= size - sizes if left else places < sizes
    return tokens.masked_fill(~real, PAD), real.long()


def batch(name: str, left: bool = False, full: bool = False) -> dict[str, Tensor]:
    """Three examples of unequal lengths (all of the same with `full`), with labels as the model takes them."""
    family = FAMILIES[name]
    size = 8 if name == "longformer" else 7  # whole windows
    tokens, mask = ids([size] * 3 if full else [size, 4, 2], size, 2, left)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if name == "longformer":
        inputs["global_attention_mask"] = (torch.arange(size) == 0).long().expand(3, size)
    if family.stacks == "both":
        target, real = ids([6, 6, 6] if full else [3, 6, 2], 6, 3)
        return {**inputs, "labels": target.masked_fill(real == 0, -100)}
    if family.stacks == "decoder":
        return {**inputs, "labels": tokens.masked_fill(mask == 0, -100)}
    if "Token" in family.model:
        return {**inputs, "labels": (tokens % CLASSES).masked_fill(mask == 0, -100)}
    return {**inputs, "labels": torch.tensor([0, 2, 1])}


def token_mask(name: str, inputs: dict[str, Tensor]) -> Tensor | None:
    """Which outputs count, written out for each kind of model; None for a classifier's."""
    family = FAMILIES[name]
    if family.stacks == "both":
        return inputs["labels"] != -100
    if family.stacks == "decoder":
        shifted = torch.full_like(inputs["labels"], -100)
        shifted[:, :-1] = inputs["labels"][:, 1:]
        return (shifted != -100) & inputs["attention_mask"].bool()
    return inputs["attention_mask"].bool() if "Token" in family.model else None


def objective(name: str, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    """AD-DROP's F with pseudo labels, written out."""
    mask = token_mask(name, inputs)
    if mask is None:
        return logits.max(-1).values.sum()
    return (torch.log_softmax(logits, -1).max(-1).values * mask).sum()


@contextmanager
def opened(sites: list[AttentionSite]) -> Iterator[list[AttentionSite]]:
    """Sites that are open, without a regularizer."""
    for site in sites:
        site.backend.open(site)
    try:
        yield sites
    finally:
        for site in sites:
            site.clear()
            site.backend.close(site)


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything that attaching changes in a model: attributes, hooks, classes and configurations."""
    found = {}
    for path, module in model.named_modules():
        hooks = {name: len(value) for name, value in vars(module).items() if name.endswith("hooks")}
        config = getattr(module, "config", None)
        held = config.to_dict() | {"attention": config._attn_implementation} if config is not None else None
        found[path] = (type(module), list(vars(module)), hooks, module.training, held)
    return found
