"""Keywords that models pass to their attention: computed, harmless, or refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, StaticCache, SwinConfig, SwinForImageClassification
from transformers.models.bert import modeling_bert

from attn_reg_plugin import ADDrop
from attn_reg_plugin.backends.huggingface.attention import COMPUTED, HARMLESS, soft_capped
from tests.backends.huggingface_models import batch, build
from tests.backends.oracle_models import batch as tiny_batch
from tests.backends.oracle_models import tiny

#: sinks for a head, sinks for a query, and soft-capping
FAMILIES = ("gpt_oss/GptOssForCausalLM", "inkling2_text/Inkling2ForCausalLM", "gemma2/Gemma2ForCausalLM")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_is_normalized_anew(family: str) -> None:
    """Dropped positions are 0. The others keep their ratios; beside a sink they do not sum to 1."""
    model = tiny("causal", *family.split("/"), attention="eager")
    inputs = tiny_batch("causal", model)
    plain = model(**inputs, output_attentions=True).attentions[0]
    with ADDrop(p=0.5, q=0.5, sites="decoder.self[0]", cross_tuning="off").attach(model) as regularizer:
        masked = model(**inputs, output_attentions=True).attentions[0]
        keep = regularizer.attached_sites[0].keep
    live = keep & (plain > 0)
    rows = live.any(-1) & (live.sum(-1) < (plain > 0).sum(-1))
    assert rows.any()
    assert (masked[rows][~live[rows]] == 0).all()
    sums = (plain * live).sum(-1)
    sinking = "gemma" not in family
    # exp(sink) stays in the denominator: A' = A / (Σ live A + share of the sink)
    expected = plain * live / (sums + ((1 - plain.sum(-1)) if sinking else 0.0)).unsqueeze(-1)
    torch.testing.assert_close(masked[rows], expected[rows], atol=1e-5, rtol=1e-4)


def test_soft_capping() -> None:
    query, key = torch.randn(2, 3, 4, 6) * 5, torch.randn(2, 3, 5, 6) * 5
    scores = torch.einsum("bhtd,bhsd->bhts", query, key) * 0.3
    torch.testing.assert_close(soft_capped(query, key, 0.3, 2.0), 2.0 * torch.tanh(scores / 2.0))
    torch.testing.assert_close(soft_capped(query, key, None, 1e6), scores / 0.3 * 6**-0.5, rtol=1e-4, atol=1e-4)


def test_an_unknown_keyword_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the attention function may read it. A None, or what only travels through, changes nothing."""
    stock = modeling_bert.eager_attention_forward

    def reading(*args: Any, temperature: float | None = None, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", reading)
    model, inputs = build("bert", attention="eager"), batch("bert")
    with ADDrop(p=0.5, q=0.5, cross_tuning="off").attach(model):
        model(**inputs, temperature=None, users_own=torch.ones(3))
        with pytest.raises(RuntimeError, match=r"^encoder\.self\[0\] \(.*\) passes temperature= to its attention, wh"):
            model(**inputs, temperature=2.0)
        model.eval()(**inputs, temperature=2.0)
    assert not COMPUTED & HARMLESS


def test_attention_that_asks_for_its_own_name_is_refused() -> None:
    """Their sparse masks are made where the attention is called `eager` or `sdpa`, and nowhere else."""
    model = tiny("causal", "glm_moe_dsa", "GlmMoeDsaForCausalLM")
    with pytest.raises(ValueError, match=r"GlmMoeDsaAttention masks keys itself .* choose other sites$"):
        ADDrop(sites="*").attach(model)


@pytest.mark.parametrize("static", [False, True], ids=["no cache", "static cache"])
def test_a_model_that_asks_whether_its_mask_is_left_out(static: bool) -> None:
    """Gemma 4's layers that use earlier ones' keys run the last queries only, unless it is `sdpa` without a mask."""
    torch.manual_seed(1)
    small = {"vocab_size": 60, "vocab_size_per_layer_input": 60, "hidden_size": 32, "intermediate_size": 32}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16}
    small |= {"hidden_size_per_layer_input": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    kinds = ["sliding_attention", "full_attention"] * 2
    model = Gemma4ForCausalLM(Gemma4TextConfig(**small, layer_types=kinds, sliding_window=64))
    ids = torch.randint(4, 60, (2, 10))

    def logits(last: int) -> Tensor:
        cache = {"past_key_values": StaticCache(model.config, max_cache_len=14)} if static else {"use_cache": False}
        return model(input_ids=ids, logits_to_keep=last, **cache).logits

    for last in (0, 1, 3):
        with torch.no_grad():
            plain = logits(last)
            with ADDrop(p=1.0, q=1e-30, sites="decoder.self[0,3]", cross_tuning="off").attach(model.eval()):
                torch.testing.assert_close(logits(last), plain, atol=1e-5, rtol=1e-4)
                assert static or last or torch.equal(logits(last), plain)
        if not static:
            with ADDrop(p=1.0, q=1e-30, sites="*", cross_tuning="off").attach(model.train()) as regularizer:
                torch.testing.assert_close(logits(last), plain, atol=1e-5, rtol=1e-4)
                assert regularizer.attached_sites[3].keep.size(2) == (last or 10)


def test_regions_of_a_shifted_window() -> None:
    """Swin adds -100 between them. Nothing of another region is a candidate, counts, or is in a uniform row."""
    options = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}
    torch.manual_seed(1)
    model, images = SwinForImageClassification(SwinConfig(**options)).train(), torch.randn(2, 3, 32, 32)
    layer = model.swin.encoder.layers[0].blocks[1]
    within = (layer.get_attn_mask(8, 8, torch.float32, images.device) == 0).repeat(2, 1, 1).unsqueeze(1)
    assert not within.all()
    with ADDrop(p=0.5, q=1.0, sites="encoder.self@blocks.1", cross_tuning="off").attach(model) as regularizer:
        model(images)
        (keep,) = (site.keep for site in regularizer.attached_sites)
        counted = regularizer.statistics.take()
    assert not (keep & ~within).any()
    assert ((within & ~keep).sum(-1) == (within.sum(-1) + 1) // 2).all()
    assert counted["valid/encoder.self[0]@blocks.1"] == 2 * within.sum()
