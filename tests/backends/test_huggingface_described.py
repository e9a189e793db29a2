"""Token masks that do not have the logits' shape: sounds, embeddings, and prompts of virtual tokens."""

from collections import UserDict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin import ADDrop
from attn_reg_plugin.backends.huggingface.inputs import decoder_ids, described
from tests.attention.tiny_model import Around
from tests.backends.huggingface_models import FAMILIES, batch, build
from tests.backends.oracle_models import accepted, tiny
from tests.backends.oracle_models import batch as tiny_batch


@pytest.mark.parametrize(("kind", "name"), [("wav2vec2", "Wav2Vec2ForCTC"), ("parakeet_ctc", "ParakeetForCTC")])
def test_a_mask_over_samples_is_left_out(kind: str, name: str) -> None:
    model = tiny("ctc", kind, name)
    inputs = accepted(model, tiny_batch("ctc", model))
    assert inputs["attention_mask"].shape[-1] > model(**inputs).logits.size(1)
    assert "token_mask" not in described(model, inputs)
    with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off").attach(model) as regularizer:
        model(**inputs).loss.backward()
        assert all(site.keep is not None for site in regularizer.attached_sites)


@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "gpt2", "llama", "marian", "bart", "t5"])
def test_tokens_and_gold_labels(name: str) -> None:
    """Real tokens that have a label; a causal model's labels are of the next token; -100 and padding are none."""
    model, inputs = build(name), batch(name)
    real, labels = inputs["attention_mask"].bool(), inputs["labels"]
    if name == "xlm_roberta":
        labels[0, 2] = -100
    told = described(model, inputs)
    stacks = FAMILIES[name].stacks
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if stacks == "decoder" else labels
    known = targets != -100 if labels.dim() == 2 else real
    assert torch.equal(told["targets"], targets)
    assert torch.equal(told["token_mask"], known if stacks == "both" else known & real)
    if stacks == "encoder" and labels.dim() == 1:
        assert not described(model, {"input_ids": inputs["input_ids"]}), "classes have no padding"
    if stacks != "both":
        embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
        for given in ({**inputs, "labels": None}, {**embedded, "attention_mask": inputs["attention_mask"]}):
            assert torch.equal(described(model, given)["token_mask"], real)
        longer = {"input_ids": inputs["input_ids"], "attention_mask": torch.cat([real, real], 1)}
        assert "token_mask" not in described(model, longer)
        return
    padding = model.config.pad_token_id
    padded = labels.masked_fill(~known, padding)
    assert torch.equal(described(model, {**inputs, "labels": padded})["token_mask"], known)
    # the decoder's input, whose start may be padding, ends before the end of the sentence; or its own mask
    labels[torch.arange(3), known.sum(-1) - 1] = model.config.eos_token_id
    shifted = model.prepare_decoder_input_ids_from_labels(labels=labels)
    told = described(model, {"decoder_input_ids": shifted})
    assert torch.equal(told["token_mask"], known) and told["padding_label"] == padding
    mask = (torch.arange(6) < 4).long().expand(3, 6)
    given = {"decoder_input_ids": shifted, "decoder_attention_mask": mask}
    assert torch.equal(described(model, given)["token_mask"], mask.bool())


@pytest.mark.parametrize("name", ["marian", "bart", "t5", "bert"])
def test_the_ids_that_a_decoder_makes_itself(name: str) -> None:
    """Of as many labels as there are source tokens, which would be taken for the decoder's otherwise."""
    model, inputs = build(name), batch(name)
    inputs["labels"] = inputs["input_ids"].flip(1) if name != "bert" else inputs["labels"]
    if name == "bert":
        assert decoder_ids(model, inputs) is None
        return
    read: list[torch.Tensor] = []
    model.get_decoder().register_forward_pre_hook(
        lambda _, args, told: read.append(told["input_ids"]), with_kwargs=True
    )
    model(**inputs)
    made = decoder_ids(model, inputs)
    assert torch.equal(made, read[0])
    assert decoder_ids(model, {**inputs, "decoder_input_ids": made}) is None


def test_several_numbers_and_shifted_labels_are_told() -> None:
    """Outputs of a regression have the shape of a classification's."""
    model, inputs = build("bert"), batch("bert")
    numbers = {**inputs, "labels": torch.zeros(3, 3)}
    assert "regression" not in described(model, numbers)
    model.config.problem_type = "regression"
    assert described(model, numbers)["regression"] is True and "regression" not in described(model, inputs)
    model, inputs = build("llama"), batch("llama")
    inputs["shift_labels"] = inputs["labels"].roll(2, 1)
    assert torch.equal(described(model, inputs)["targets"], inputs["shift_labels"])


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"])
@pytest.mark.parametrize("name", ["llama", "marian"])
def test_virtual_tokens_count_as_nothing(name: str, kind: str) -> None:
    """A learned prompt comes before the tokens in a decoder's outputs; an encoder's, or a prefix of keys, does not."""
    model, inputs = build(name), batch(name)
    plain = described(model, inputs)
    submodules = {"llama": 1, "marian": 2}[name]
    prompt: Any = SimpleNamespace(num_virtual_tokens=4, peft_type=kind, num_transformer_submodules=submodules)
    model.active_peft_config = prompt
    told, added = described(model, inputs), 4 if name == "llama" and kind != "PREFIX_TUNING" else 0
    for key, nothing in (("token_mask", False), ("targets", -100)):
        assert (told[key][:, :added] == nothing).all() and torch.equal(told[key][:, added:], plain[key])


def test_a_module_around_a_model_that_generates_is_told_of_as_it_is() -> None:
    for name in ("llama", "marian", "bert"):
        model, inputs = build(name), batch(name)
        told, around = described(model, inputs), described(Around(Around(model)), inputs)
        assert told.keys() == around.keys()
        assert all(torch.equal(told[key], around[key]) for key in ("token_mask", "targets"))
    two = Around(build("llama"))
    two.other = build("llama")
    assert torch.equal(described(two, batch("llama"))["targets"], batch("llama")["labels"]), "which one is not known"


class OfABatch(Around):
    """Takes its inputs as one mapping."""

    def forward(self, batch: Mapping[str, Any]) -> Any:
        return super().forward(**batch)


@pytest.mark.parametrize("name", ["llama", "marian", "bert"])
def test_a_batch_in_one_argument_is_told_of_as_its_parts_are(name: str) -> None:
    inputs, told = batch(name), []

    def objective(outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        told.append(inputs)
        return outputs.logits.sum()

    for wrap, given in ((Around, None), (OfABatch, inputs), (OfABatch, UserDict(inputs))):
        model = wrap(build(name))
        with ADDrop(cross_tuning="off", sites="*", objective=objective).attach(model):
            model(**inputs) if given is None else model(given)
    for key in ("token_mask", "targets", "padding_label"):
        assert all(
            torch.equal(torch.as_tensor(one[key]), torch.as_tensor(told[0][key])) for one in told if key in told[0]
        )
    assert all(told[0].keys() - {"args", "kwargs"} <= one.keys() for one in told)


@pytest.mark.parametrize("keep", [3, torch.tensor([0, 4, 5])])
def test_only_logits_that_are_kept_are_told_of(keep: Any) -> None:
    """A model that computes few logits has an objective over these: the loss is the caller's."""
    model, inputs = build("llama"), batch("llama")
    all_of = described(model, inputs)
    labels = inputs.pop("labels")
    told = described(model, {**inputs, "labels": labels, "logits_to_keep": keep})
    places = slice(-3, None) if isinstance(keep, int) else keep
    assert torch.equal(told["token_mask"], all_of["token_mask"][:, places])
    assert torch.equal(told["targets"], all_of["targets"][:, places])
    with ADDrop(p=0.5, q=0.5, sites="*", cross_tuning="off").attach(model) as regularizer:
        regularizer.supply(targets=told["targets"])
        assert model(**inputs, logits_to_keep=keep).logits.shape[1] == 3
        assert all(not site.keep.all() for site in regularizer.attached_sites)


@pytest.mark.parametrize(
    ("kind", "name", "shifts"),
    [("llama", "LlamaForCausalLM", True), ("bart", "BartForCausalLM", False), ("xlnet", "XLNetLMHeadModel", False)],
)
def test_labels_are_shifted_where_the_loss_shifts_them(kind: str, name: str, shifts: bool) -> None:
    """BART's decoder alone and XLNet compare the output at t with the label at t."""
    model = tiny("causal", kind, name).eval()
    labels = torch.randint(4, 40, (2, 5))
    labels[0, 3:] = -100
    expected = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1) if shifts else labels
    told = described(model, {"input_ids": labels.clamp(min=1), "labels": labels})
    assert torch.equal(told["targets"], expected)
    logits = model(input_ids=labels.clamp(min=1)).logits
    stock = model(input_ids=labels.clamp(min=1), labels=labels).loss
    torch.testing.assert_close(stock, torch.nn.functional.cross_entropy(logits.flatten(0, 1), expected.flatten()))


@pytest.mark.parametrize(
    ("kind", "name"), [("t5gemma", "T5GemmaForTokenClassification"), ("umt5", "UMT5ForTokenClassification")]
)
def test_a_taggers_class_may_have_the_number_of_padding(kind: str, name: str) -> None:
    """An encoder-decoder that writes nothing has classes as labels, of which 0 equals the padding."""
    model = tiny("token", kind, name)
    inputs = accepted(model, tiny_batch("token", model))
    inputs["labels"] = torch.full_like(inputs["labels"], model.config.pad_token_id)
    inputs["labels"][:, -1] = -100
    told = described(model, inputs)
    assert torch.equal(told["token_mask"], inputs["labels"] != -100) and "padding_label" not in told


def test_the_end_of_a_sentence_may_have_the_number_of_padding() -> None:
    """As in Whisper: it is predicted like any other piece, and -100 alone says what is not."""
    model, inputs = build("marian"), batch("marian")
    model.config.pad_token_id = model.config.eos_token_id
    inputs["labels"][:, -2:] = torch.tensor([model.config.eos_token_id, -100])
    told = described(model, inputs)
    assert torch.equal(told["token_mask"], inputs["labels"] != -100) and told["token_mask"][:, -2].all()
