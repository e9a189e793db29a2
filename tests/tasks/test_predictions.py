"""Models that give something else than (B, T, V) or (B, C) logits: what of it is attributed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.masked_lm import MaskedLmLoss
from fairseq.criterions.nat_loss import LabelSmoothedDualImitationCriterion
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from fairseq.tasks.translation_lev import TranslationLevenshteinTask
from torch import Tensor, nn

from attn_reg_plugin.callbacks import example_outcomes
from attn_reg_plugin.regularizers.ad_drop.objectives import OfOutputs
from attn_reg_plugin.tasks.attend_out_training import FairseqProblem
from attn_reg_plugin.tasks.predictions import FairseqObjective, adaptive_log_probabilities
from tests.backends.fairseq_models import SIZES, words
from tests.tasks.tasks_in_process import attached, sample, step

#: architectures that insert words, and the noise that their task makes
FAMILIES = {
    "nonautoregressive_transformer": "full_mask",
    "iterative_nonautoregressive_transformer": "full_mask",
    "cmlm_transformer": "random_mask",
    "levenshtein_transformer": "random_delete",
    "insertion_transformer": "random_delete",
}


def build(architecture: str, **flags: Any) -> nn.Module:
    args = SimpleNamespace(**{**SIZES, "dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, **flags})
    ARCH_CONFIG_REGISTRY[architecture](args)
    shared = words()
    torch.manual_seed(1)
    task = SimpleNamespace(source_dictionary=shared, target_dictionary=shared, dictionary=shared)
    return ARCH_MODEL_REGISTRY[architecture].build_model(args, task).train()


def noisy(noise: str) -> dict[str, Any]:
    """A batch as the task translation_lev makes it."""
    batch = sample()
    target = batch["target"]
    target[:, 0] = 0  # the beginning of a sentence; the end is not to be deleted
    target.scatter_(1, (target.ne(1).sum(1, keepdim=True) - 1), 2)
    task = SimpleNamespace(cfg=SimpleNamespace(noise=noise), tgt_dict=words())
    torch.manual_seed(5)
    batch["prev_target"] = TranslationLevenshteinTask.inject_noise(task, target)
    return batch


def heard(task: Any) -> list[tuple[Any, Tensor]]:
    """From now on the outputs that the task's objective is given, and its F of them."""
    seen: list[tuple[Any, Tensor]] = []
    held = task.regularizer.objective
    inner = held.objective
    held.objective = lambda outputs, inputs: seen.append((outputs, inner(outputs, inputs))) or seen[-1][1]
    return seen


@pytest.mark.parametrize("labels", ["pseudo", "gold"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_insert_words(family: str, labels: str) -> None:
    model = build(family, share_all_embeddings=True, label_smoothing=0.1)
    loss, batch = LabelSmoothedDualImitationCriterion(None, 0.1), noisy(FAMILIES[family])
    plain, _ = step(attached(model, attn_reg="none"), model, batch, loss)
    task = attached(model, ad_drop_labels=labels)
    ours, log = step(task, model, batch, loss)
    assert log["attn_reg/regularized"] == 1 and log["attn_reg/fallbacks"] == 0
    assert log["attn_reg/dropped/encoder.self[0]"] > 0 and ours != plain


def test_f_of_inserted_words_is_that_of_their_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 5, generator=generator)
    mask, target = torch.rand(2, 3, generator=generator) > 0.4, torch.randint(5, (2, 3), generator=generator)
    outputs = {"length": {"out": torch.randn(2, 9)}, "word_ins": {"out": logits, "tgt": target, "mask": mask}}
    chances = logits.log_softmax(-1)
    inputs = {"token_mask": torch.ones(7, 7).bool()}
    for labels, of_labels in (
        ("pseudo", chances.max(-1).values),
        ("gold", chances.gather(-1, target[..., None])[..., 0]),
    ):
        objective = FairseqObjective(OfOutputs(labels), labels, 1, "a model")
        torch.testing.assert_close(objective(outputs, inputs), (of_labels * mask).sum())
    shares = torch.rand(2, 3, 5, generator=generator)
    outputs["word_ins"]["tgt"] = shares
    torch.testing.assert_close(objective(outputs, inputs), (chances * shares * mask[..., None]).sum())
    outputs["word_ins"] |= {"out": logits.half(), "tgt": target}
    torch.testing.assert_close(objective(outputs, inputs), (of_labels * mask).sum(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tied", [False, True])
def test_log_probabilities_of_an_adaptive_softmax_are_fairseqs(tied: bool) -> None:
    torch.manual_seed(1)
    inputs = AdaptiveInput(30, 1, 16, 2.0, 16, [8, 20]) if tied else None
    softmax = AdaptiveSoftmax(30, 16, [8, 20], 0.0, factor=2.0, adaptive_inputs=inputs)
    features = torch.randn(2, 5, 16)
    ours = adaptive_log_probabilities(softmax, features)
    torch.testing.assert_close(ours, softmax.get_log_prob(features, None))
    torch.testing.assert_close(ours.exp().sum(-1), torch.ones(2, 5))


@pytest.mark.parametrize("labels", ["pseudo", "gold"])
def test_a_language_model_with_an_adaptive_softmax(labels: str) -> None:
    flags = {"adaptive_softmax_cutoff": "8,20", "tokens_per_sample": 16, "max_target_positions": 16}
    model = build("transformer_lm_big", **flags)
    batch = sample()
    batch["net_input"] = {"src_tokens": batch["net_input"]["prev_output_tokens"]}
    loss = AdaptiveLoss(SimpleNamespace(target_dictionary=words()), False)
    loss.ddp_backend = "no_c10d"
    task = attached(model, attn_sites="decoder.self", ad_drop_labels=labels)
    seen = heard(task)
    _, log = step(task, model, batch, loss)
    assert log["attn_reg/dropped/decoder.self[1]"] > 0 and log["attn_reg/fallbacks"] == 0
    assert seen[0][0].shape == (3, 6, len(words())), "log-probabilities of words, not features"
    model = build("transformer_lm_big", **flags)
    with pytest.raises(ValueError, match=r"--attn-reg r_drop compares .* without --adaptive-softmax-cutoff$"):
        step(attached(model, attn_reg="r_drop"), model, batch, loss)


def test_rewards_of_an_adaptive_softmax_are_of_full_precision() -> None:
    flags = {"adaptive_softmax_cutoff": "8,20", "tokens_per_sample": 16, "max_target_positions": 16}
    model, batch = build("transformer_lm_big", **flags).bfloat16().eval(), sample()
    batch["net_input"] = {"src_tokens": batch["net_input"]["prev_output_tokens"]}
    problem = FairseqProblem.__new__(FairseqProblem)
    problem.task, problem.criterion = SimpleNamespace(target_dictionary=words()), None
    log_probs = adaptive_log_probabilities(model.decoder.adaptive_softmax, model(**batch["net_input"])[0])
    expected = example_outcomes(log_probs, batch["target"], batch["target"].ne(words().pad()))
    assert log_probs.dtype == torch.float32 and problem.loss(model, {"batch": batch}).loss.equal(expected.loss)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("labels", ["pseudo", "gold"])
def test_a_masked_lm(labels: str, masked: bool) -> None:
    flags = {"tokens_per_sample": 16, "max_positions": 16, "encoder_layers_to_keep": None}
    model = build("roberta", **flags)
    batch = sample()
    target = batch["net_input"]["src_tokens"].clone()
    target[:, 1::2] = 1
    target = target if masked else torch.full_like(target, 1)
    batch |= {"target": target, "net_input": {"src_tokens": batch["net_input"]["src_tokens"]}}
    loss = MaskedLmLoss(
        SimpleNamespace(tpu=False), SimpleNamespace(source_dictionary=words(), target_dictionary=words())
    )
    task = attached(model, ad_drop_labels=labels)
    seen = heard(task)
    _, log = step(task, model, batch, loss)
    assert log["attn_reg/fallbacks"] == 0 and log["attn_reg/forwards"] == 1
    task.regularizer.detach()
    chances = model(batch["net_input"]["src_tokens"])[0].detach().log_softmax(-1)
    chances[..., 1] = -torch.inf if labels == "pseudo" else chances[..., 1]
    best = chances.max(-1).values if labels == "pseudo" else chances.gather(-1, target[..., None])[..., 0]
    torch.testing.assert_close(seen[0][1], best[target.ne(1)].sum())


def test_frames_of_speech_count_where_they_are_real_and_other_outputs_are_refused() -> None:
    logits, padded = torch.randn(4, 2, 5), torch.tensor([[False] * 4, [False, False, True, True]])
    objective = FairseqObjective(OfOutputs("pseudo"), "pseudo", None, "a model")
    best = logits.transpose(0, 1).log_softmax(-1).max(-1).values
    outputs = {"encoder_out": logits, "padding_mask": padded}
    torch.testing.assert_close(objective(outputs, {"targets": torch.ones(2, 3)}), best[~padded].sum())
    with pytest.raises(ValueError, match=r"Wav of a task: .*needs gold labels.*--ad-drop-labels pseudo"):
        FairseqObjective(OfOutputs("gold"), "gold", None, "Wav of a task")(outputs, {"targets": torch.ones(2, 3)})
    objective = FairseqObjective(OfOutputs("pseudo"), "pseudo", None, "Strange of my_task")
    with pytest.raises(ValueError, match=r"^Strange of my_task: .*of type dict.*--ad-drop-attribution random"):
        objective({"x": torch.ones(2, 3)}, {})
