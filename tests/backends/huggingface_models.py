"""Tiny transformers models of every supported family, with random weights, and batches for them: a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.backends.oracle_models import CLASSES, PAD, WORDS, ids, tiny_config

WIDTH, HEADS, LAYERS = 32, 4, 2


@dataclass(frozen=True)
class Family:
    """One row: the model type and class in transformers, and which sites a tiny model has."""

    kind: str
    model: str
    stacks: str = "encoder"  # or `decoder`, or `both`
    checkpointing: bool = True  # transformers can checkpoint it, and its attention runs once in a forward
    interface: bool = True  # its attention calls transformers' attention interface, or else is an ordinary module
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sites(self) -> list[str]:
        """The names of all sites, in the order of the model's modules."""
        encoder = [f"encoder.self[{layer}]" for layer in range(LAYERS)]
        if self.stacks == "encoder":
            return encoder
        if self.stacks == "decoder":
            return [f"decoder.self[{layer}]" for layer in range(LAYERS)]
        return encoder + [f"decoder.{kind}[{layer}]" for layer in range(LAYERS) for kind in ("self", "cross")]


_OWN: dict[str, Any] = {"interface": False}
FAMILIES = {
    "bert": Family("bert", "BertForSequenceClassification"),
    "roberta": Family("roberta", "RobertaForSequenceClassification"),
    "electra": Family("electra", "ElectraForSequenceClassification"),
    "distilbert": Family("distilbert", "DistilBertForSequenceClassification"),
    "xlm_roberta": Family("xlm-roberta", "XLMRobertaForTokenClassification"),
    "albert": Family(
        "albert", "AlbertForSequenceClassification", checkpointing=False, options={"num_hidden_groups": 1}
    ),
    "modernbert": Family(
        "modernbert",
        "ModernBertForTokenClassification",
        options={"local_attention": 4, "global_attn_every_n_layers": 2},
    ),
    "marian": Family("marian", "MarianMTModel", "both", options={"max_position_embeddings": 40}),
    "bart": Family("bart", "BartForConditionalGeneration", "both"),
    "mbart": Family("mbart", "MBartForConditionalGeneration", "both"),
    "m2m_100": Family("m2m_100", "M2M100ForConditionalGeneration", "both"),
    "t5": Family("t5", "T5ForConditionalGeneration", "both"),
    "gpt2": Family("gpt2", "GPT2LMHeadModel", "decoder"),
    "llama": Family("llama", "LlamaForCausalLM", "decoder"),
    "deberta": Family("deberta", "DebertaForTokenClassification", **_OWN),
    "deberta_v3": Family("deberta-v2", "DebertaV2ForSequenceClassification", **_OWN),
    "mpnet": Family("mpnet", "MPNetForSequenceClassification", checkpointing=False, **_OWN),
    "xlnet": Family("xlnet", "XLNetForTokenClassification", checkpointing=False, **_OWN),
    "roformer": Family("roformer", "RoFormerForTokenClassification", **_OWN),
    "mvp": Family("mvp", "MvpForConditionalGeneration", "both", **_OWN),
    "longformer": Family("longformer", "LongformerForSequenceClassification", checkpointing=False, **_OWN),
}
#: those whose attention can be called sdpa and eager: the others have one form
INTERFACE = [name for name, family in FAMILIES.items() if family.interface]
FORMS = [(name, form) for form in ("sdpa", "eager") for name in (FAMILIES if form == "sdpa" else INTERFACE)]


def config_of(name: str, dropout: float = 0.0, **options: Any) -> Any:
    """The configuration of a tiny model of the family `name`, with dropout wherever it has some."""
    family = FAMILIES[name]
    default = transformers.AutoConfig.for_model(family.kind).to_dict()
    dropouts = {key: dropout for key, value in default.items() if "drop" in key and isinstance(value, float)}
    dropouts |= dict.fromkeys((key for key in dropouts if "layerdrop" in key), 0.0)
    special = {"num_labels": CLASSES, "forced_eos_token_id": None}
    return tiny_config(family.kind, **{**special, **dropouts, **family.options, **options})


def build(name: str, dropout: float = 0.0, seed: int = 1, attention: str = "sdpa", **options: Any) -> nn.Module:
    """A model of the family `name` in training mode, its attention maps made sharp: far from uniform."""
    family, config = FAMILIES[name], config_of(name, dropout, **options)
    torch.manual_seed(seed)
    form = {"attn_implementation": attention} if family.interface else {}
    model = getattr(transformers, family.model)._from_config(config, **form)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() in (2, 3):
                parameter.normal_(std=0.3)
                if parameter.size(0) == WORDS or parameter.size(0) == WORDS + 2:
                    parameter[PAD].zero_()
    return model.train()


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


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything that attaching changes in a model: attributes, hooks, classes and configurations."""
    found = {}
    for path, module in model.named_modules():
        hooks = {name: len(value) for name, value in vars(module).items() if name.endswith("hooks")}
        config = getattr(module, "config", None)
        held = config.to_dict() | {"attention": config._attn_implementation} if config is not None else None
        found[path] = (type(module), list(vars(module)), hooks, module.training, held)
    return found
