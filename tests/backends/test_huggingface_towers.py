"""Models with several towers: every site has a name of its own, and towers can be selected."""

import logging

import pytest
import torch
import transformers

from attn_reg_plugin import ADDrop, AttendOut, AttentionSite, find_sites
from attn_reg_plugin.attention.selection import SiteSelector, name_towers
from attn_reg_plugin.backends.huggingface import modules
from attn_reg_plugin.regularizers.base.options import OptionError
from tests.backends.huggingface_models import build
from tests.backends.oracle_models import tiny


def sites_at(*paths: str) -> list[AttentionSite]:
    """Sites of one stack and kind, the layer of each the first number in its path."""
    layers = [next((int(name) for name in path.split(".") if name.isdigit()), 0) for path in paths]
    sites = [AttentionSite("encoder", "self", layer, path) for layer, path in zip(layers, paths, strict=True)]
    name_towers(sites)
    return sites


TOWERS = {
    "two towers, the second deeper": (
        ("text.layers.0.attn", "vision.layers.0.attn", "vision.layers.1.attn"),
        ("[0]@text", "[0]@vision", "[1]@vision"),
    ),
    "one inside the other": (("model.encoder.0.attn", "model.encoder.pool.attn"), ("[0]@encoder.0", "[0]@pool")),
    "blocks of a stage": (
        ("stages.0.blocks.0.attn", "stages.0.blocks.1.attn", "stages.1.blocks.0.attn"),
        ("[0]@blocks.0", "[0]@blocks.1", "[1]"),
    ),
    "blocks of two towers": (
        ("a.0.blocks.0.x", "a.0.blocks.1.x", "b.0.blocks.0.x"),
        ("[0]@a@blocks.0", "[0]@a@blocks.1", "[0]@b"),
    ),
    "one tower": (("layers.0.attn", "layers.1.attn"), ("[0]", "[1]")),
}


@pytest.mark.parametrize("case", TOWERS)
def test_names_are_unique_and_select_their_site(case: str) -> None:
    paths, names = TOWERS[case]
    sites = sites_at(*paths)
    found = [site.name.removeprefix("encoder.self") for site in sites]
    assert found == list(names)
    for site in sites:
        assert SiteSelector(site.name).select(sites) == [site]
    assert SiteSelector("encoder.self").select(sites) == sites


def test_a_part_of_a_path_selects_a_tower() -> None:
    sites = sites_at("text_model.layers.0.attn", "vision_model.layers.0.attn", "vision_model.layers.1.attn")
    assert SiteSelector("*@vision_model").select(sites) == sites[1:]
    assert SiteSelector("encoder.self[0]@vision_model encoder.self@text_model").select(sites) == sites[:2]
    assert SiteSelector("*@vision_model.layers@attn").select(sites) == sites[1:]
    for pattern in ("*@model", "*@vision", "encoder.self[1]@text_model"):
        with pytest.raises(ValueError, match=r"matches nothing in this model; its sites are: encoder\.self\[0\]@text"):
            SiteSelector(pattern).select(sites)
    for pattern in ("*@", "@vision_model", "encoder.self@a b[0]", "encoder@x[0]"):
        with pytest.raises(ValueError, match="is not understood"):
            SiteSelector(pattern)


def test_towers_drop_apart_and_are_counted_apart() -> None:
    """Of a text and an image encoder beside each other, neither causal."""
    options = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    text, image = transformers.SiglipTextConfig(**options), transformers.SiglipVisionConfig(**options, image_size=32)
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=image)).train()
    names = {f"encoder.self[{layer}]@{tower}" for tower in ("text_model", "vision_model") for layer in (0, 1)}
    transformers_own = [site for site in find_sites(model, "*") if site.path.split(".")[-1] == "self_attn"]
    assert {site.name for site in transformers_own} == names
    inputs = {"input_ids": torch.randint(4, 40, (2, 5)), "pixel_values": torch.randn(2, 3, 32, 32)}
    regularizer = ADDrop(
        p=0.5, q=1.0, sites="encoder.self[0]@text_model encoder.self[0]@vision_model", cross_tuning="off",
        objective=lambda outputs, inputs: outputs.logits_per_text.sum(),
    )  # fmt: skip
    with regularizer.attach(model):
        model(**inputs)
        shapes = {site.tower: site.keep.shape[-1] for site in regularizer.attached_sites}
        counted = regularizer.statistics.take()
    with pytest.raises(OptionError, match=r"\[0\]@text_model is in one of several towers"):
        AttendOut(sites="encoder.self").attach(model)
    assert shapes == {"text_model": 5, "vision_model": 4}
    assert counted["valid/encoder.self[0]@text_model"] != counted["valid/encoder.self[0]@vision_model"]


def test_a_causal_text_stack_is_a_decoder() -> None:
    """Also where its attention does not know that it is causal; the image stack beside it is an encoder."""
    model = tiny("causal", "clip", "CLIPModel")
    assert {site.path.split(".")[0]: site.stack for site in find_sites(model, "*")} == {
        "text_model": "decoder",
        "vision_model": "encoder",
    }


@pytest.mark.parametrize(
    ("head", "kind", "name", "left_out"),
    [
        ("seq2seq", "longt5", "LongT5ForConditionalGeneration", "LongT5LayerLocalSelfAttention: encoder.block.0"),
        ("seq2seq", "pegasus_x", "PegasusXForConditionalGeneration", "PegasusXGlobalLocalAttention: model.encoder"),
        ("causal", "minimax", "MiniMaxForCausalLM", "MiniMaxLightningAttention: model.layers.1.self_attn"),
    ],
)
def test_attention_that_no_site_stands_for_is_named_once(
    head: str, kind: str, name: str, left_out: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "_WARNED", set())
    model = tiny(head, kind, name)
    with caplog.at_level(logging.WARNING, modules.__name__):
        for _ in range(2):
            find_sites(model, "*")
    (told,) = [record.getMessage() for record in caplog.records if record.name == modules.__name__]
    uncovered, path = left_out.split(": ")
    assert uncovered in told and path in told and "is not regularized" in told
    with caplog.at_level(logging.WARNING, modules.__name__):
        caplog.clear()
        find_sites(build("bert"), "*")
        assert not caplog.records
