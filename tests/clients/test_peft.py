"""PEFT: the base is frozen, adapters are trained, and masks are those of the model that they make together."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft")

import peft
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

from attn_reg_plugin import ADDrop, AttendOut, find_sites, gradient_attribution, recording
from attn_reg_plugin.backends.huggingface.inputs import described
from attn_reg_plugin.regularizers.hidden_cut import HiddenCut
from tests.backends.huggingface_models import batch, build, objective
from tests.huggingface.trainers import ad_drop, trainer_of

pytestmark = pytest.mark.clients
ATTENTION = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]}
FEED_FORWARD = {"bert": ["intermediate.dense"], "llama": ["down_proj"]}
TASKS = {"bert": "SEQ_CLS", "llama": "CAUSAL_LM"}
#: where the adapters are: in all layers' attention or feed-forward networks, or the upper layer's only
PLACES: dict[str, tuple[dict[str, list[str]], dict[str, Any]]] = {
    "attention": (ATTENTION, {}),
    "feed-forward": (FEED_FORWARD, {}),
    "upper attention": (ATTENTION, {"layers_to_transform": [1]}),
    "upper feed-forward": (FEED_FORWARD, {"layers_to_transform": [1]}),
}


def lora(name: str, place: str = "attention", **options: Any) -> LoraConfig:
    """Adapters that change the model from the start."""
    modules, where = PLACES[place]
    given = {"task_type": TASKS[name], "r": 2, "target_modules": modules[name], "init_lora_weights": False}
    return LoraConfig(**{**given, **where, **options})


#: each with a Llama
OTHERS = {
    "dora": lora("llama", use_dora=True),
    "saved modules": lora("llama", modules_to_save=["lm_head"]),
    "ia3": IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
    "oft": peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=4, r=0, target_modules=["q_proj"], init_weights=False),
    "vera": peft.VeraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_weights=False),
    "loha": peft.LoHaConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_weights=False),
    "adalora": peft.AdaLoraConfig(
        task_type="CAUSAL_LM", init_r=2, target_r=1, total_step=9, target_modules=["q_proj"], init_lora_weights=False
    ),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "llama adapter": peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1),
}


def adapted(name: str, config: Any, attention: str = "sdpa") -> PeftModel:
    """A tiny model with adapters, in training mode without dropout."""
    model = build(name, attention=attention)
    torch.manual_seed(2)
    return get_peft_model(model, copy.deepcopy(config)).train()


def step(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The loss, and the gradients of what is trained."""
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    trained = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *(gradient.clone() for gradient in trained)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TASKS)
def test_a_frozen_base_is_attributed_as_a_trained_one(name: str, place: str) -> None:
    """The probe reaches every attention, below all that is trained too: ∂F/∂A of materialized maps, by autograd."""
    inputs, config = batch(name), lora(name, place)
    literal = adapted(name, config, attention="eager").requires_grad_(True)
    outputs = literal(**inputs, output_attentions=True)
    expected = torch.autograd.grad(objective(name, inputs, outputs.logits), outputs.attentions)
    model = adapted(name, config)
    sites = find_sites(model, "*")
    with recording(sites):
        found = gradient_attribution(objective(name, inputs, model(**inputs).logits), sites)
        tapes = [site.tapes[0] for site in sites]
    assert len(found) == len(expected) == 2
    for tape, attribution, gradient in zip(tapes, found, expected, strict=True):
        valid = tape.valid.expand_as(attribution)
        precision = 3e-6 * max(1.0, float(gradient.abs().max()))  # of fp32, where the largest are near 10
        torch.testing.assert_close(attribution.where(valid, 0), gradient.where(valid, 0), atol=precision, rtol=1e-4)
        assert attribution.abs().max() > 1e-4


@pytest.mark.parametrize("kind", OTHERS)
def test_other_adapters(kind: str) -> None:
    """With nothing dropped they train as without us, and AD-DROP drops at every attention."""
    inputs = batch("llama")
    expected = step(adapted("llama", OTHERS[kind]), inputs)
    model = adapted("llama", OTHERS[kind])
    told = described(model, inputs)
    assert told["token_mask"].shape == told["targets"].shape == model(**inputs).logits.shape[:2], "a prompt's, too"
    with ADDrop(p=0.5, q=1e-30, sites="decoder.self", cross_tuning="off").attach(model) as regularizer:
        torch.testing.assert_close(step(model, inputs), expected, atol=1e-6, rtol=1e-4)
        assert all(site.keep is not None for site in regularizer.attached_sites)
    with ADDrop(p=0.5, q=1.0, sites="*", cross_tuning="off").attach(model) as regularizer:
        step(model, inputs)
        dropped = [site.keep for site in regularizer.attached_sites]
    assert len(dropped) == 2 and not any(keep.all() for keep in dropped)


def test_prompts_that_a_method_cannot_take(tmp_path: Path) -> None:
    for kind in ("prompt", "prefix"):
        model = adapted("llama", OTHERS[kind])
        with pytest.raises(ValueError, match="reads token ids, which a learned prompt has none of"):
            trainer_of(tmp_path, "llama", AttendOut(sites="*"), model=model).train()
    with pytest.raises(ValueError, match=r"hidden_cut: decoder.self\[0\] has 10 keys for 7 tokens, as with a prefix"):
        trainer_of(tmp_path, "llama", HiddenCut(sites="*"), model=adapted("llama", OTHERS["prefix"])).train()


def test_merged_adapters_have_the_same_masks() -> None:
    model, kept = adapted("llama", lora("llama")), []
    for merge in (lambda: None, model.merge_adapter):
        merge()
        with ADDrop(p=0.5, q=1.0, sites="*", cross_tuning="off").attach(model) as regularizer:
            model(**batch("llama"))
            kept.append([site.keep for site in regularizer.attached_sites])
    assert len(kept[0]) == 2 and all(map(torch.equal, *kept))


def test_a_trainer_of_adapters(tmp_path: Path) -> None:
    """AD-DROP acts in 20 updates, the base stays as it was, p = 0 is the stock training; PEFT loads what is saved."""
    trained = {}
    for key, regularizer in {"stock": None, "idle": ad_drop(p=0.0), "ad_drop": ad_drop()}.items():
        model = adapted("llama", lora("llama", lora_dropout=0.1))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer = trainer_of(tmp_path / key, "llama", regularizer, model=model)
        trainer.train()
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert moved == {name for name in before if "lora_" in name}
        trained[key] = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if name in moved])
    assert torch.equal(trained["idle"], trained["stock"]) and not torch.equal(trained["ad_drop"], trained["stock"])
    assert all(line["attn_reg/drop_rate"] > 0.1 for line in trainer.state.log_history if "loss" in line)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = PeftModel.from_pretrained(build("llama"), tmp_path / "saved")
    inputs = batch("llama")
    torch.testing.assert_close(loaded.eval()(**inputs).logits, model.eval()(**inputs).logits)
