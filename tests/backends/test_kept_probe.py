"""AD-DROP without a probe: what is kept is what a fresh probe of the loss finds, with the same weights and dropout."""

from __future__ import annotations

import pytest
import torch
from attn_reg_plugin.regularizers.example_digests import examples_of
from attn_reg_plugin.regularizers.region_files import Setting
from attn_reg_plugin.regularizers.region_lookup import stacks_of
from torch import nn

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import Tokens
from attn_reg_plugin.regularizers.base.forward import Forward
from attn_reg_plugin.regularizers.base.statistics import Statistics
from tests.attention.tiny_model import PAD, loss_of, tokens
from tests.backends import fairseq_models, huggingface_models

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ["fairseq", "bert", "bert, left", "marian", "llama", "torch", "own", "deberta", "xlnet", "longformer"]
#: family, direction, and what is special about the training
CASES = [
    *((name, direction, "plain") for name in FAMILIES for direction in ("high", "low")),
    *((name, "high", "scaled and in parts") for name in FAMILIES),
    *((name, "high", "checkpointed") for name in ("bert, left", "marian", "llama", "own", "deberta")),
    *((name, "high", "reentrant") for name in ("bert, left", "marian", "llama")),
]


class TorchTranslator(nn.Module):
    """PyTorch's own Transformer on token ids."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.2, batch_first=True)
        self.output = nn.Linear(8, 13)

    def forward(self, source, target, source_padding_mask, target_padding_mask):
        future = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)
        states = self.transformer(
            3 * self.embedding(source),
            3 * self.embedding(target),
            tgt_mask=future,
            src_key_padding_mask=source_padding_mask,
            tgt_key_padding_mask=target_padding_mask,
            memory_key_padding_mask=source_padding_mask,
        )
        return self.output(states)


def problem(name, dropping_translator):
    """A model with dropout, arguments of its forward, its loss, and the checkpointing switch."""
    if name == "fairseq":
        model, inputs = fairseq_models.transformer(dropout=0.2, attention_dropout=0.2), fairseq_models.batch()
        return model, inputs, lambda outputs: loss_of(outputs[0], inputs["prev_output_tokens"]), None
    if name in ("torch", "own"):
        source, target = tokens([6, 4, 2], 6, seed=1), tokens([3, 5, 1], 5, seed=2)
        inputs = {"source": source, "target": target}
        torch.manual_seed(3)
        if name == "own":
            supplied = {"source": source, "target": target}
            return dropping_translator, supplied, lambda outputs: loss_of(outputs, target), "own"
        inputs |= {"source_padding_mask": source.eq(PAD), "target_padding_mask": target.eq(PAD)}
        return TorchTranslator().train(), inputs, lambda outputs: loss_of(outputs, target), None
    family, _, left = name.partition(", ")
    inputs = huggingface_models.batch(family, left=bool(left))
    return huggingface_models.build(family, dropout=0.2), inputs, lambda outputs: outputs.loss, "transformers"


def checkpointed(model, switch, reentrant):
    if switch == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    else:
        model.encoder.checkpointed = model.decoder.checkpointed = True


def backward(model, inputs, loss, scale, parts):
    """A training step's backward; of a loss in parts, one after the other."""
    torch.manual_seed(7)
    outputs = model(**inputs)
    (loss(outputs) * scale / parts).backward()


@pytest.mark.parametrize(("name", "direction", "way"), CASES)
def test_what_is_kept_is_what_a_fresh_probe_finds(name, direction, way, dropping_translator):
    model, inputs, loss, switch = problem(name, dropping_translator)
    if way in ("checkpointed", "reentrant"):
        checkpointed(model, switch, way == "reentrant")
    scale, parts = (2.0**16, 4) if way.startswith("scaled") else (1.0, 1)
    fresh = ADDrop(p=0.4, q=1.0, sites="*", cross_tuning="off", direction=direction, objective=lambda o, i: -loss(o))
    with fresh.attach(model):
        torch.manual_seed(7)
        model(**inputs)
        masks = {site.name: [call.keep.unpacked() for call in site.calls] for site in fresh.attached_sites}
    kept = ADDrop(p=0.4, q=0.5, sites="*", direction=direction, probe="kept", on_miss="plain")
    supplied = {}
    if name == "own":
        supplied = {"encoder": inputs["source"], "decoder": inputs["target"]}
        supplied = {stack: Tokens(ids, ids.ne(PAD)) for stack, ids in supplied.items()}
    with kept.attach(model):
        kept.begin_epoch(1)
        kept.supply(example_tokens=supplied or None)
        backward(model, inputs, loss, scale, parts)
        kept.end_update()
        forward = Forward(model, (), inputs, kept.supplied, kept._attachment._described(model, (), inputs))
        examples = examples_of(forward)
        found = kept.kept.find(forward, Setting(0.4, direction), Statistics())
        assert not found.missing and len(masks) == len(kept.attached_sites)
        for index, site in enumerate(kept.attached_sites):
            for call, keep in enumerate(masks[site.name]):
                region = found.region(site, (index, call), tuple(keep.shape), torch.device("cpu"))
                tokens = [
                    examples.real.get(stack, torch.ones(len(keep), n, dtype=torch.bool))
                    for stack, n in zip(stacks_of(site), keep.shape[2:], strict=True)
                ]
                if call:  # Longformer's second is of the one global token, which comes first
                    tokens[0] = tokens[0][:, :1]
                queries, keys = tokens[0][:, None, :, None], tokens[1][:, None, None, :]
                real = queries & keys
                if name == "longformer" and not call:
                    places = torch.arange(keep.size(-1))
                    near = (places[:, None] - places).abs() <= 2
                    real = real & (near | (places == 0)) & (places > 0)[:, None]
                causal = site.stack == "decoder" and site.kind == "self"
                real = real & torch.ones(keep.shape[2:], dtype=torch.bool).tril() if causal else real
                assert real.any() and ((~keep & real) == (region & real)).all(), site.name
                assert not (region & ~(queries & keys)).any()
