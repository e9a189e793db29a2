"""Real tokens and gold labels, read off the arguments of a transformers model's forward."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from attn_reg_plugin.attention.graphs import uncompiled
from attn_reg_plugin.regularizers.base.outputs import IGNORED


def described(model: nn.Module, named: Mapping[str, Any]) -> dict[str, Any]:
    """`token_mask`, `targets` and `padding_label` as an objective needs them.

    Args:
        model: a transformers model, or a module around one whose outputs, where that one generates, are its.
        named: the forward's arguments by name.

    Returns:
        `token_mask`, bool (B, T), True where the output is a real token and has a label if there are labels;
        `targets`, the labels where outputs answer them: a causal language model predicts the next token, so its
        labels are shifted by one (`shift_labels` are already); `padding_label`, the number of padding where a decoder
        writes pieces of a vocabulary; `regression`, True where outputs (B, C) are C numbers. Each is missing where the
        arguments do not show it. With `logits_to_keep` mask and targets are those of the kept places.
    """
    inner = transformers_model(model)
    model = inner if inner is not None and inner.can_generate() else model
    config = getattr(model, "config", None)
    targets = labels = _tensor(named, "labels")
    if labels is not None and labels.dim() == 2 and predicts_next(model):
        shifted = _tensor(named, "shift_labels")  # transformers' loss takes them for the labels
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED) if shifted is None else shifted
    if getattr(config, "is_encoder_decoder", "decoder_input_ids" in named):
        mask = _decoder_tokens(named, model)
    else:
        mask = _tokens(named)
        if targets is not None and targets.dim() == 2 and not targets.is_floating_point():
            known = targets != IGNORED
            same = mask is not None and mask.shape == known.shape
            ids = _tensor(named, "input_ids")
            tokens = same or (mask is None and ids is not None and ids.shape == known.shape)
            mask = (known & mask if same else known) if tokens else mask
    if virtual := _virtual_tokens(model):
        mask = None if mask is None else F.pad(mask, (virtual, 0), value=False)
        if targets is not None and targets.dim() == 2:
            targets = F.pad(targets, (virtual, 0), value=IGNORED)
    mask, targets = (_kept(one, named, mask) for one in (mask, targets))
    told = {"token_mask": mask, "targets": targets, "padding_label": _padding_label(model)}
    numbers = labels is not None and labels.dim() == 2 and labels.is_floating_point()
    told["regression"] = True if numbers and getattr(config, "problem_type", None) == "regression" else None
    return {name: value for name, value in told.items() if value is not None}


def transformers_model(model: nn.Module) -> nn.Module | None:
    """The transformers model, or PEFT's around it, that `model` is or is around; None if it is around several."""
    found, left = set(), [model]
    while left:
        module = left.pop()
        if hasattr(module, "can_generate"):
            found.add(uncompiled(module))
        else:
            left.extend(module.children())
    return found.pop() if len(found) == 1 else None


def _tokens(named: Mapping[str, Any]) -> Tensor | None:
    """The attention mask, if it is over the tokens that the outputs answer.

    A mask over the raw samples of a sound is longer than they are.
    """
    mask = _real(_tensor(named, "attention_mask"))
    given = next((named[name] for name in ("input_ids", "inputs_embeds") if _tensor(named, name) is not None), None)
    sound = any(_tensor(named, name) is not None for name in ("input_values", "input_features"))
    fits = not sound if given is None else mask is not None and given.shape[:2] == mask.shape
    return mask if fits else None


def _kept(told: Tensor | None, named: Mapping[str, Any], mask: Tensor | None) -> Tensor | None:
    """The places (B, T) of `logits_to_keep`, where a model computes no other logits: the last ones, or by index."""
    keep = named.get("logits_to_keep")
    whole = told is not None and mask is not None and told.shape == mask.shape
    if not whole or not isinstance(keep, int | Tensor) or (isinstance(keep, int) and keep <= 0):
        return told
    return told[:, -keep:] if isinstance(keep, int) else told[:, keep]


def _virtual_tokens(model: nn.Module) -> int:
    """How many outputs a prompt of learned tokens puts before the others (PEFT).

    A prefix of keys and values puts none there, nor does a prompt of an encoder before the decoder's.
    """
    prompt, config = getattr(model, "active_peft_config", None), getattr(model, "config", None)
    kind = str(getattr(prompt, "peft_type", "")).rpartition(".")[2]
    encoders = kind in ("PROMPT_TUNING", "P_TUNING") or getattr(prompt, "num_transformer_submodules", 1) == 1
    if kind in ("PREFIX_TUNING", "CARTRIDGE") or (encoders and getattr(config, "is_encoder_decoder", False)):
        return 0
    return getattr(prompt, "num_virtual_tokens", None) or 0


def predicts_next(model: nn.Module) -> bool:
    """Whether the model compares its output at t with the label at t + 1: it generates, has no encoder, and shifts.

    The losses of some, such as XLNet's, TrOCR's and BART's decoder, take labels as they are: their forward computes a
    cross entropy of its own, in which nothing is called a shift.
    """
    if not _writes(model) or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    names = set() if code is None else {*code.co_names, *code.co_varnames}
    own = "loss_function" not in names and bool(names & {"CrossEntropyLoss", "cross_entropy"})
    return not own or any("shift" in name for name in names)


def _padding_label(model: nn.Module) -> int | None:
    """The number of padding in what a decoder writes; None where it means something else as well."""
    config = getattr(model, "config", None)
    if not _writes(model) or not getattr(config, "is_encoder_decoder", False):
        return None
    # a configuration of two joined models may have neither
    padding, end = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    return None if padding in (end if isinstance(end, list) else [end]) else padding


def _writes(model: nn.Module) -> bool:
    """Whether labels of a decoder are pieces of a vocabulary, and not a tagger's classes."""
    return getattr(model, "can_generate", bool)()


def _decoder_tokens(named: Mapping[str, Any], model: nn.Module) -> Tensor | None:
    """Real tokens of a decoder's output: by its attention mask, else by the labels, else by its input.

    The input's first token starts the sentence, whatever it is: for some models it is the padding token, for others
    the end of a sentence. Nothing is predicted from a later end. A tagger's label may be the number of padding.
    """
    config = getattr(model, "config", None)
    padding, end = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    mask, labels = _real(_tensor(named, "decoder_attention_mask")), _tensor(named, "labels")
    if labels is not None and labels.dim() == 2:
        known = labels != IGNORED
        ours = _padding_label(model)
        known = known if ours is None else known & (labels != ours)
        return known if mask is None else known & mask
    ids = _tensor(named, "decoder_input_ids")
    if mask is None and ids is not None and padding is not None:
        mask = (ids != padding) & (ids != (end if isinstance(end, int) else padding))
        mask[:, 0] = True
    return mask


def decoder_ids(model: nn.Module, named: Mapping[str, Any]) -> Tensor | None:
    """Return the ids (B, T) that a decoder reads where its model makes them of labels or of its only input."""
    model = transformers_model(model) or model
    config, labels = getattr(model, "config", None), _tensor(named, "labels")
    made_of = labels if labels is not None and labels.dim() == 2 and _writes(model) else _tensor(named, "input_ids")
    given = any(named.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    start = getattr(config, "decoder_start_token_id", None)
    if given or made_of is None or start is None or not getattr(config, "is_encoder_decoder", False):
        return None
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels=made_of)
    ids = F.pad(made_of[:, :-1], (1, 0), value=start)
    return ids.masked_fill(ids == IGNORED, config.pad_token_id)


def _tensor(named: Mapping[str, Any], name: str) -> Tensor | None:
    value = named.get(name)
    return value if isinstance(value, Tensor) else None


def _real(mask: Tensor | None) -> Tensor | None:
    """A mask over tokens, (B, T); one of another shape isn't used."""
    return mask.bool() if mask is not None and mask.dim() == 2 else None
