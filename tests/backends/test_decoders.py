"""Decoder-only models: padded, instruction, packed and cached batches against each text alone, evaluated literally.

The literal evaluation runs one text without padding through the stock model in `eager`, differentiates Σ log P of its
predictions by the attention maps with autograd, and drops the largest of each row.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, StaticCache

from attn_reg_plugin import ADDrop, find_sites, gradient_attribution, recording
from attn_reg_plugin.regularizers.ad_drop.objectives import OfOutputs
from attn_reg_plugin.regularizers.base.hooks.forward import Forward, described
from tests.backends.oracle_models import PAD, WORDS, tiny_config

IGNORED, LAYERS = -100, 2
LOCAL = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
#: by model type, options of the tiny configuration
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, **LOCAL},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8, **LOCAL},
    "gemma3_text": {"query_pre_attn_scalar": 8, **LOCAL},
    "gpt_oss": LOCAL,
    "gpt2": {},
}
#: transformers computes soft-capping and sinks in `eager` only
EAGER = ("gemma2", "gpt_oss")
WAYS = ("right", "left", "packed", "static cache")
#: transformers' gpt-oss does not separate the texts of a row
CASES = [(kind, way) for kind in FAMILIES for way in WAYS if (kind, way) != ("gpt_oss", "packed")]


def decoder(kind: str, attention: str = "") -> nn.Module:
    """A tiny model in training mode without dropout, its attention maps far from uniform."""
    how = attention or ("eager" if kind in EAGER else "sdpa")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **FAMILIES[kind]), attn_implementation=how)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    return model.train()


def texts() -> list[tuple[Tensor, Tensor]]:
    """Ids and labels of three texts; the labels of their prompts, of 3, 1 and 2 tokens, are ignored."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for length, prompt in ((7, 3), (4, 1), (6, 2)):
        ids = torch.randint(4, WORDS, (length,), generator=generator)
        made.append((ids, ids.masked_fill(torch.arange(length) < prompt, IGNORED)))
    return made


def arranged(model: nn.Module, way: str) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """The texts as one batch, and the row and the place of each text's first token in it."""
    given = texts()
    if way == "packed":  # one row without padding: the position ids say where a text begins, and nothing predicts it
        lengths = torch.tensor([0, *(len(ids) for ids, _ in given)]).cumsum(0)
        features = [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in given]
        row = DataCollatorWithFlattening(return_tensors="pt")(features)
        assert "attention_mask" not in row
        # with a cache transformers does not look at where texts begin
        return {**row, "use_cache": False}, [(0, int(start)) for start in lengths[:-1]]
    longest = max(len(ids) for ids, _ in given)
    batch = {"input_ids": torch.full((3, longest), PAD), "labels": torch.full((3, longest), IGNORED)}
    batch["attention_mask"] = torch.zeros(3, longest, dtype=torch.long)
    places = []
    for i, (ids, labels) in enumerate(given):
        start = longest - len(ids) if way == "left" else 0
        here = slice(start, start + len(ids))
        batch["input_ids"][i, here], batch["labels"][i, here], batch["attention_mask"][i, here] = ids, labels, 1
        places.append((i, start))
    if way == "static cache":
        cache = StaticCache(config=model.config, max_cache_len=longest + 3)
        return {**batch, "past_key_values": cache, "use_cache": True}, places
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return batch, places


def literal(kind: str, ids: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Compute ∂F/∂A (H, T, T) of a text alone, layer by layer, and which positions are attended."""
    outputs = decoder(kind, "eager")(input_ids=ids.unsqueeze(0), output_attentions=True)
    objective = torch.zeros(())
    for t in range(len(ids) - 1):
        if labels[t + 1] != IGNORED:
            objective = objective + torch.log_softmax(outputs.logits[0, t], -1).max()
    gradients = torch.autograd.grad(objective, outputs.attentions)
    return [(gradient[0], weights[0] > 0) for gradient, weights in zip(gradients, outputs.attentions, strict=True)]


def blocks(kind: str, places: list[tuple[int, int]]) -> Iterator[tuple[int, tuple[int, slice], Tensor, Tensor]]:
    """(layer, where, attribution, attended) of each text in each layer."""
    for (ids, labels), (row, start) in zip(texts(), places, strict=True):
        for layer, (expected, attended) in enumerate(literal(kind, ids, labels)):
            yield layer, (row, slice(start, start + len(ids))), expected, attended


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_attributions_and_masks_are_those_of_each_text_alone(kind: str, way: str) -> None:
    """No text sees another's tokens, padding or an empty place of a cache, and only tokens with a loss count."""
    model = decoder(kind)
    inputs, places = arranged(model, way)
    ours = ADDrop(p=0.5, q=1.0, sites="decoder.self", cross_tuning="off")
    with ours.attach(model):
        told = described(ours._attachment.backends, Forward(model, (), inputs))
        model(**inputs)
        masks = [site.keep for site in ours.attached_sites]
    inputs, _ = arranged(model, way)  # the cache is full
    sites = find_sites(model, "decoder.self")
    with recording(sites):
        forward = Forward(model, (), inputs, described=told)
        objective = OfOutputs()(forward.run(), forward.inputs)
        found = gradient_attribution(objective, sites)
        tapes = [site.tapes[0] for site in sites]
    assert len(found) == len(masks) == LAYERS
    compared = 0
    for layer, (row, here), expected, attended in blocks(kind, places):
        valid = tapes[layer].valid.expand(len(tapes[layer].valid), 1, *found[layer].shape[2:])[row, 0, here]
        assert torch.equal(valid[:, here], attended[0]), (kind, way, layer)
        assert int(valid.sum()) == int(attended[0].sum()), "nothing outside the text is attended"
        attribution = found[layer][row, :, here, here].where(attended, 0.0)
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(attribution, expected.where(attended, 0.0), atol=1e-5 * scale, rtol=1e-4)
        compared += compare_rows(masks[layer][row, :, here, here], expected, attended)
    assert compared > 20


def compare_rows(keep: Tensor, expected: Tensor, attended: Tensor) -> int:
    """Every row drops its n - int(n/2) largest; rows with ties, as those that nothing depends on, are left out."""
    compared = 0
    for head, t in torch.cartesian_prod(torch.arange(keep.size(0)), torch.arange(keep.size(1))).tolist():
        keys = attended[head, t].nonzero().flatten()
        ordered, by = expected[head, t, keys].sort(descending=True)
        if len(keys) < 2 or float((ordered[:-1] - ordered[1:]).min()) < 1e-5:
            continue
        count = len(keys) - len(keys) // 2
        dropped = (~keep[head, t, keys]).nonzero().flatten()
        assert sorted(dropped.tolist()) == sorted(by[:count].tolist())
        compared += 1
    return compared


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_frozen_decoder_has_the_masks_of_a_trained_one(reentrant: bool | None) -> None:
    """As under adapters of the upper layer: no parameter below its feed-forward network is trained."""
    masks = []
    for frozen in (False, True):
        model = decoder("llama")
        inputs, _ = arranged(model, "right")
        if frozen:
            model.requires_grad_(False)
            model.model.layers[-1].mlp.requires_grad_(True)
            if reentrant is not None:
                model.activation_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
        with ADDrop(p=0.5, q=1.0, sites="decoder.self", cross_tuning="off").attach(model) as regularizer:
            model(**inputs).loss.backward()
            masks.append([site.keep for site in regularizer.attached_sites])
    assert all(map(torch.equal, *masks)) and not any(keep.all() for keep in masks[0])
    assert all((p.grad is None) is not p.requires_grad for p in model.parameters())
