"""Attention that is an ordinary module: several calls in a forward, and what is done to the module."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from attn_reg_plugin import ADDrop, AttentionLayerDrop, find_sites, recording
from attn_reg_plugin.attention.attribution import map_gradient, output_gradients
from attn_reg_plugin.regularizers import Combination
from attn_reg_plugin.regularizers.attention_dropout import AttentionDropout
from tests.backends.huggingface_models import HEADS, LAYERS, batch, build, config_of
from tests.backends.materialized import Materialized


def attributed(
    model: nn.Module, inputs: dict[str, Tensor], counted: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The output, and of every call of every site the attribution and what is valid."""
    sites = find_sites(model, "*")
    with recording(sites):
        output = model(**inputs)[0]
        tapes = [tape for site in sites for tape in site.tapes]
        gradients = output_gradients((output[counted].sin()).sum(), tapes)
    given = [torch.zeros_like(tape.output) if g is None else g for g, tape in zip(gradients, tapes, strict=True)]
    maps = [map_gradient(gradient, tape.value) for gradient, tape in zip(given, tapes, strict=True)]
    return output, maps, [tape.valid.expand_as(one) for tape, one in zip(tapes, maps, strict=True)]


def test_longformers_attributions_are_those_of_its_windows() -> None:
    """Longformer's maps (B, T, H, G + 2 w + 1) hold global keys, then the window; global queries have their own."""
    model = build("longformer").longformer
    inputs = batch("longformer")
    everywhere = torch.zeros(3, 8, dtype=torch.bool)
    everywhere[0, [0, 5]] = everywhere[1, 1] = True
    inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")} | {
        "global_attention_mask": everywhere.long()
    }
    real = inputs["attention_mask"].bool()
    with Materialized() as written_out:
        expected = model(**inputs)[0]
    maps = written_out.maps
    gradients = torch.autograd.grad(expected[real].sin().sum(), maps)
    output, found, valid = attributed(model, inputs, real)
    torch.testing.assert_close(output[real], expected[real], atol=1e-5, rtol=1e-5)
    assert len(found) == len(maps) == 2 * LAYERS
    for local, rows, seen, seen_rows, of_window, of_rows in zip(
        found[::2], found[1::2], valid[::2], valid[1::2], gradients[::2], gradients[1::2], strict=True
    ):
        of_rows = of_rows.view(3, HEADS, 2, 8)
        for b in range(3):
            slots = everywhere[b].nonzero().flatten().tolist()
            for i in range(8):
                for j in range(8):
                    there = bool(real[b, i] and real[b, j])
                    near = there and not everywhere[b, i] and (j in slots or abs(i - j) <= 2)
                    assert (seen[b, :, i, j] == near).all()
                    if near:
                        column = slots.index(j) if j in slots else 2 + j - i + 2
                        torch.testing.assert_close(local[b, :, i, j], of_window[b, i, :, column], atol=1e-5, rtol=1e-4)
            for slot in range(2):
                there = real[b] & torch.tensor(slot < len(slots))
                assert (seen_rows[b, :, slot] == there).all()
                torch.testing.assert_close(rows[b, :, slot, there], of_rows[b, :, slot, there], atol=1e-5, rtol=1e-4)
    assert max(one.abs().max() for one in found) > 1e-2


def test_longformers_weights_are_not_given_while_it_is_regularized() -> None:
    model, inputs = build("longformer"), batch("longformer")
    with ADDrop(p=0.5, q=0.5, cross_tuning="off").attach(model):
        said = r"^encoder\.self\[0\] .* returns no weights while it is regularized; give"
        with pytest.raises(RuntimeError, match=said):
            model(**inputs, output_attentions=True)
        assert model.eval()(**inputs, output_attentions=True).attentions is not None


def test_both_streams_of_xlnet() -> None:
    """Two calls a layer, each with its mask; of several words some are predicted from those before in a permutation."""
    torch.manual_seed(1)
    config = config_of("xlnet")
    model = transformers.XLNetLMHeadModel(config).train()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    inputs = {key: value for key, value in batch("xlnet").items() if key != "labels"}
    hidden = torch.rand(3, 7, 7, generator=torch.Generator().manual_seed(4)) < 0.5
    hidden[:, :, 0] = False  # every row has a key
    mapping = torch.zeros(3, 2, 7)
    mapping[:, 0, 1] = mapping[:, 1, 0] = 1.0
    inputs |= {"perm_mask": hidden.float(), "target_mapping": mapping}
    with Materialized() as written_out:
        expected = model(**inputs)[0]
    maps = written_out.maps
    gradients = torch.autograd.grad(expected.sin().sum(), maps, allow_unused=True)
    output, found, valid = attributed(model, inputs, torch.ones(3, 2, dtype=torch.bool))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert len(found) == len(maps) == 2 * LAYERS and gradients[-2] is None  # nobody reads the last content stream
    for one, seen, gradient in zip(found, valid, gradients, strict=True):
        gradient = torch.zeros_like(one) if gradient is None else gradient
        torch.testing.assert_close(one * seen, gradient * seen, atol=1e-4, rtol=1e-4)
    with ADDrop(p=0.5, q=0.5, cross_tuning="off").attach(model) as regularizer:
        assert not model(**inputs).logits.allclose(expected)
        assert all(len(site.calls.made) == 2 for site in regularizer.attached_sites)


def test_attention_layer_drop_drops_both_calls_of_longformer_or_neither() -> None:
    model, inputs = build("longformer").longformer.train(), batch("longformer")
    inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    inputs["global_attention_mask"] = torch.zeros_like(inputs["input_ids"]).index_fill(1, torch.tensor([0]), 1)
    left_out, seen = AttentionLayerDrop(p=0.5), []
    with Combination([left_out, AttentionDropout(p=0.1)]).attach(model):
        for _ in range(12):
            model(**inputs)
            seen += [[call.uniform for call in site.calls.made] for site in left_out.attached_sites]
    assert sorted(map(tuple, {tuple(calls) for calls in seen})) == [(False, False), (True,)]


def test_a_method_that_was_replaced_before_is_back_afterwards() -> None:
    """And what somebody puts around ours while it is there stays and runs the model's own."""
    model, inputs = build("mpnet"), batch("mpnet")
    expected = model(**inputs).logits
    first, second = (site.module for site in find_sites(model))
    calls: list[str] = []

    def wrapped(name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    before = first.forward = partial(wrapped, "before", first.forward)
    with ADDrop(p=1.0, q=1.0, cross_tuning="off").attach(model):
        second.forward = partial(wrapped, "meanwhile", second.forward)
        assert not model(**inputs).logits.allclose(expected)
        calls.clear()
        assert torch.equal(model.eval()(**inputs).logits, expected)
        assert calls == ["before", "meanwhile"]
    assert first.forward is before
    assert torch.equal(model(**inputs).logits, expected)


class Own(MPNetSelfAttention):
    """Computes something else."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        return (self.o(hidden_states),)


class Sharded(MPNetSelfAttention):
    """As `fully_shard` makes them: it computes the same."""


@pytest.mark.parametrize("kind", [Own, Sharded])
def test_subclasses_are_sites_if_they_compute_the_same(kind: type) -> None:
    model = build("mpnet")
    model.mpnet.encoder.layer[1].attention.attn.__class__ = kind
    assert len(find_sites(model)) == (2 if kind is Sharded else 1)
    with ADDrop(p=0.5, q=0.5, cross_tuning="off").attach(model):
        model(**batch("mpnet")).loss.backward()


def test_learned_keys_are_refused() -> None:
    model, inputs = build("mvp", use_prompt=True, prompt_length=2, prompt_mid_dim=8), batch("mvp")
    said = r"^\w+\.self\[0\] .* has learned keys \(use_prompt=True\), which cannot be"
    with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off").attach(model), pytest.raises(RuntimeError, match=said):
        model(**inputs)


def test_a_row_without_keys_is_xlnets_own() -> None:
    """A place that may see nothing attends to all keys alike, as stock has it."""
    model = transformers.XLNetLMHeadModel(config_of("xlnet"))
    inputs = {key: value for key, value in batch("xlnet").items() if key == "input_ids"}
    hidden = torch.zeros(*inputs["input_ids"].shape, inputs["input_ids"].size(1))
    hidden[:, 2] = 1
    asked = torch.zeros(hidden.size(0), 1, hidden.size(1))
    asked[:, :, 2] = 1
    inputs |= {"perm_mask": hidden, "target_mapping": asked}
    expected = model(**inputs).logits
    sites = find_sites(model, "*")
    with recording(sites):
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
        assert all(site.tapes for site in sites)
