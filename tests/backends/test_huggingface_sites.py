"""The transformers backend: which sites it finds and refuses, what it leaves behind, and what a forward tells."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_reg_plugin import ADDrop, find_sites
from attn_reg_plugin.attention.calls import opened
from attn_reg_plugin.backends.huggingface.attention import open_sites
from attn_reg_plugin.regularizers.base.hooks.attachment import attachments_of
from tests.backends.huggingface_models import FAMILIES, FORMS, batch, build, fingerprint

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_attention_is_a_site_in_the_order_of_the_model(name: str) -> None:
    model = build(name)
    sites = find_sites(model, "*")
    assert [site.name for site in sites] == FAMILIES[name].sites
    assert all(model.get_submodule(site.path) is site.module for site in sites)
    wrapped = nn.ModuleDict({"crossencoder": nn.ModuleList([nn.Identity(), model])})
    assert [site.name for site in find_sites(wrapped, "*")] == FAMILIES[name].sites


def test_an_encoder_and_a_decoder_joined() -> None:
    """BERT as a decoder has `encoder` in its paths, causal self attention and cross attention."""
    encoder = transformers.BertConfig(**SMALL)
    decoder = transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    sites = find_sites(transformers.EncoderDecoderModel(config), "*")
    assert [site.name for site in sites] == FAMILIES["bart"].sites
    assert sites[-1].path == "decoder.bert.encoder.layer.1.crossattention.self"


def test_layers_of_an_albert_that_shares_less() -> None:
    config = transformers.AlbertConfig(**{**SMALL, "num_hidden_layers": 4}, num_hidden_groups=2, inner_group_num=2)
    model = transformers.AlbertModel(config).train()
    sites = find_sites(model, "*")
    assert sorted(site.layer for site in sites) == list(range(8))
    assert {s.layer: s.path[-30:] for s in sites}[5] == "groups.1.albert_layers.1.attention"[-30:]
    order = []
    with opened(sites):
        for site in sites:
            site.ask(sampler=lambda call, shape, valid, device: order.append(call.site.layer))
        model(input_ids=torch.randint(4, 40, (2, 5)))
        model(input_ids=torch.randint(4, 40, (2, 5)))
    assert order == list(range(8)) * 2


def test_a_shared_attention_under_checkpointing_is_refused() -> None:
    """transformers does not checkpoint ALBERT; who does it by hand is told."""
    model, inputs = build("albert"), batch("albert")
    layer = model.albert.encoder.albert_layer_groups[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
    model(**inputs).loss.backward()
    said = r"serves 2 layers but was called once more .*turn activation checkpointing off"
    with ADDrop(p=0.5, q=0.5, cross_tuning="off").attach(model), pytest.raises(RuntimeError, match=said):
        model(**inputs).loss.backward()


def test_a_forward_that_broke_off_does_not_shift_the_layers() -> None:
    model, inputs = build("albert"), batch("albert")
    with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off").attach(model):
        torch.manual_seed(1)
        expected = model(**inputs).logits
        handle = model.albert.encoder.albert_layer_groups[0].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**inputs)
        handle.remove()
        torch.manual_seed(1)
        assert torch.equal(model(**inputs).logits, expected)


def test_a_model_without_sites_is_refused() -> None:
    model = transformers.NystromformerModel(transformers.NystromformerConfig(**SMALL))
    said = r"^NystromformerModel's attention does not go through transformers' attention interface; .* such as"
    with pytest.raises(ValueError, match=said):
        ADDrop().attach(model)


REFUSED = {
    "talking heads": ("deberta", {"talking_head": True}, "sdpa", r"mixes its heads' maps \(talking_head=True\), which"),
    "upcast": ("gpt2", {"reorder_and_upcast_attn": True}, "eager", "reorder_and_upcast_attn=True, which cannot be reg"),
    **{
        name: ("bert", {}, name, f"='{name.replace('|', '.')}', which cannot be regularized; load the model with")
        for name in ("flex_attention", "flash_attention_2", "paged|eager")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_attention_is_refused(case: str) -> None:
    name, options, attention, said = REFUSED[case]
    model = build(name, **options)
    model.config._attn_implementation_internal = attention
    before = fingerprint(model)
    with pytest.raises(ValueError, match=rf"^\w+\.self\[0\] .*{said}"):
        ADDrop(sites="*").attach(model)
    assert fingerprint(model) == before


def test_an_attention_that_is_taken_away_is_noticed() -> None:
    model, inputs = build("bert"), batch("bert")
    with ADDrop(p=0.5, q=0.5, cross_tuning="off").attach(model):
        model(**inputs)
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match=r"^encoder\.self\[0\] .* ran without calling the attention interface"):
            model(**inputs)
        model.eval()(**inputs)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name, attention", FORMS)
def test_detaching_leaves_nothing(name: str, attention: str, tmp_path: Path) -> None:
    """Also by an exception inside a step; while attached, a checkpoint is a stock one all the same."""
    model, inputs = build(name, dropout=0.1, attention=attention), batch(name)
    model(**inputs)  # transformers notes in the configuration what it learns from the labels
    model.save_pretrained(tmp_path / "stock")
    before, keys = fingerprint(model), list(model.state_dict())
    with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off").attach(model) as regularizer:
        assert fingerprint(model) != before
        for site in regularizer.attached_sites if FAMILIES[name].interface else ():
            used = site.module.config._attn_implementation
            assert used.startswith("attn_reg") and not any(part in used for part in ("sdpa", "flash", "flex", "/"))
        model(**inputs).loss.backward()
        assert list(model.state_dict()) == keys
        model.save_pretrained(tmp_path / "attached")
    assert fingerprint(model) == before
    regularizer = ADDrop(sites="*", cross_tuning="off", objective=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), regularizer.attach(model):
        model(**inputs)
    assert fingerprint(model) == before
    stock = (tmp_path / "stock" / "config.json").read_text()
    assert "attn_reg" not in stock
    assert (tmp_path / "attached" / "config.json").read_text() == stock


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_two_regularizers_on_one_model_leave_nothing(name: str) -> None:
    """The first to go leaves the other's sites open, in a copy, too."""
    model, inputs = build(name), batch(name)
    model(**inputs)
    before = fingerprint(model)
    first, second = (ADDrop(p=1, q=1, sites=f"encoder.self[{layer}]", cross_tuning="off") for layer in (0, 1))
    first.attach(model)
    with pytest.raises(ValueError, match=r"^encoder\.self\[0\] is regularized already"):
        ADDrop(sites="*").attach(model)
    second.attach(model)
    twins = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        second, first = (attachment.regularizer for attachment in attachments_of(twin))
        first.detach()
        twin(**inputs)
        assert second.attached_sites[0].keep is not None
        assert float(second.statistics.take()["dropped/encoder.self[1]"]) > 0
        second.detach()
        assert fingerprint(twin) == before


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_a_copy_of_an_attached_model_is_attached_to_a_copy(name: str) -> None:
    """And what is closed on one is not closed on the other."""
    model, inputs = build(name), batch(name)
    expected = model(**inputs).logits
    with ADDrop(p=1.0, q=1.0, cross_tuning="off").attach(model):
        torch.manual_seed(1)
        regularized = model(**inputs).logits
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        torch.manual_seed(1)
        assert torch.equal(twin(**inputs).logits, regularized)
        assert torch.equal(twin.eval()(**inputs).logits, expected)
        (site, *_), (ours, *_) = find_sites(twin), find_sites(model)
        held = [site] if name == "mpnet" else open_sites(site.module).sites
        assert held == [site] and site is not ours and site.module is twin.get_submodule(site.path)
    assert torch.equal(model(**inputs).logits, expected)


def test_models_that_share_a_configuration() -> None:
    config = transformers.BertConfig(**SMALL)
    models = [transformers.BertForSequenceClassification(config).train() for _ in range(2)]
    ids = torch.randint(4, 40, (2, 5))
    regularizers = [ADDrop(p=1, q=1, cross_tuning="off") for _ in models]
    for model, regularizer in zip(models, regularizers, strict=True):
        regularizer.attach(model)
    regularizers[0].detach()
    for model in models:
        model(input_ids=ids)
    assert float(regularizers[1].statistics.take()["dropped/encoder.self[0]"]) > 0
    regularizers[1].detach()
    assert config._attn_implementation == "sdpa"
