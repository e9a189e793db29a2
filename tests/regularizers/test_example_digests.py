"""What an example is recognized by: its tokens, whatever stands beside them in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_reg_plugin.regularizers import Supplied, Tokens
from attn_reg_plugin.regularizers.example_digests import examples_of
from attn_reg_plugin.regularizers.probing import Forward
from tests.attention.tiny_model import PAD, tokens
from tests.backends import fairseq_models, huggingface_models


class Taker(nn.Module):
    """A model that no backend describes; its arguments are given by name."""

    def forward(self, **inputs):
        """Never called."""


def examples(described=None, supplied=None, targets=None, **inputs):
    told = Supplied(targets=targets, example_tokens=supplied)
    return examples_of(Forward(Taker(), (), inputs, told, described or {}))


def padded(ids, left=0, right=0):
    """More padding on either side."""
    return nn.functional.pad(ids, (left, right), value=PAD)


def told(ids):
    return {"encoder": Tokens(ids, ids.ne(PAD))}


IDS = tokens([5, 3, 1], 5)
CPU = torch.device("cpu")


def test_padding_and_neighbours_do_not_matter():
    digests = examples(supplied=told(IDS)).digests
    assert len(set(digests)) == 3 and all(len(digest) == 16 for digest in digests)
    assert examples(supplied=told(padded(IDS, 2, 3))).digests == digests
    assert examples(supplied=told(IDS[[2, 0]])).digests == [digests[2], digests[0]]
    assert examples(supplied=told(IDS.int())).digests == digests, "nor does the type of the ids"
    other = IDS.clone()
    other[0, 0] += 1
    assert examples(supplied=told(other)).digests[1:] == digests[1:]
    assert examples(supplied=told(other)).digests[0] != digests[0]


def test_source_and_target_are_told_apart():
    def both(source, target):
        return examples(supplied={s: Tokens(x, x.ne(PAD)) for s, x in (("encoder", source), ("decoder", target))})

    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])
    made = [both(first, second), both(second, first), both(first[:, :2], torch.tensor([[3, 4, 5]]))]
    assert len({one.digests[0] for one in made}) == 3
    assert made[0].lengths("encoder", 3).tolist() == [3] and made[0].lengths("decoder", 2).tolist() == [2]


def test_real_tokens_come_first():
    found = examples(supplied=told(padded(IDS, 2, 1)))
    assert found.lengths("encoder", 8).tolist() == [5, 3, 1]
    assert found.order("encoder", 8, CPU)[1].tolist() == [2, 3, 4, 0, 1, 5, 6, 7]
    assert found.order("encoder", 8, CPU) is found.order("encoder", 8, CPU), "copied to a device once for all sites"
    assert found.order("decoder", 8, CPU) is None and found.lengths("decoder", 8).tolist() == [8, 8, 8]
    assert found.lengths("encoder", 9).tolist() == [9, 9, 9], "an attention over something else than the tokens"
    assert examples(supplied=told(IDS)).order("encoder", 5, CPU) is None, "they are first already"


@pytest.mark.parametrize("mask", ["attention_mask", "token_mask", "padding_mask"])
def test_ids_and_their_mask_are_found_among_the_arguments(mask):
    wide = padded(IDS, 0, 2)
    real = wide.ne(PAD)
    found = examples(**{"words": wide, mask: ~real if mask == "padding_mask" else real.long()}, sizes=torch.ones(3))
    assert found.digests == examples(words=IDS, attention_mask=IDS.ne(PAD)).digests
    assert found.lengths("encoder", 7).tolist() == found.lengths("decoder", 7).tolist() == [5, 3, 1]


def test_several_texts_are_all_looked_at_and_none_is_cut():
    masks = {"attention_mask": IDS.ne(PAD)}
    pair = examples(first_text=IDS, second_text=IDS.flip(0), **masks)
    assert pair.digests != examples(first_text=IDS, second_text=IDS, **masks).digests
    assert pair.lengths("encoder", 5).tolist() == [5, 5, 5]
    one = examples(first_text=IDS, token_type_ids=IDS, position_ids=IDS, **masks)
    assert one.digests == examples(first_text=IDS, **masks).digests, "what goes with the tokens is none"


@pytest.mark.parametrize("name", ["input_features", "pixel_values"])
def test_sound_and_pictures_are_examples_too(name):
    torch.manual_seed(0)
    numbers = torch.rand(3, 4, 6)
    found = examples(**{name: numbers, "labels": torch.tensor([1, 2, 3])})
    assert len(set(found.digests)) == 3 and found.lengths("encoder", 6).tolist() == [6, 6, 6]
    assert examples(**{name: numbers.bfloat16()}).digests == examples(**{name: numbers.bfloat16()}).digests


@pytest.mark.parametrize("given", ["labels", "targets"])
def test_gold_labels_are_no_examples(given):
    """Two examples with one label aren't one, and labels of padded places aren't a second text."""
    answers = {given: torch.tensor([[1], [0], [1], [0]])}
    found = examples(features=torch.rand(4, 6, 2), attention_mask=torch.ones(4, 6).long(), **answers)
    assert len(set(found.digests)) == 4
    tags, wide = IDS.masked_fill(IDS.eq(PAD), -100), padded(IDS, 0, 2)
    narrow = examples(words=IDS, padding_mask=IDS.eq(PAD), **{given: tags})
    tags = nn.functional.pad(tags, (0, 2), value=-100)
    assert examples(words=wide, padding_mask=wide.eq(PAD), **{given: tags}).digests == narrow.digests


def test_speech_and_what_is_said_are_both_looked_at():
    """Also a supplied mask of tokens says which are real."""
    sound, wide = torch.rand(3, 9, 2), padded(IDS, 0, 2)
    found = examples(features=sound, target_ids=IDS)
    assert not set(found.digests) & set(examples(features=sound + 1, target_ids=IDS).digests)
    spoken = examples(source_language_ids=IDS, target_ids=IDS)  # the one of its stack, whatever it is called
    assert not set(spoken.digests) & set(examples(source_language_ids=IDS + 1, target_ids=IDS).digests)
    assert examples(words=wide, described={"token_mask": wide.ne(PAD)}).lengths("encoder", 7).tolist() == [5, 3, 1]


def test_what_cannot_be_told_is_refused():
    for inputs in ({"labels": torch.tensor([1, 2])}, {"labels": torch.tensor([[1], [2]])}, {"targets": IDS}):
        with pytest.raises(ValueError, match="no tensor with an example per row"):
            examples(**inputs)
    pairs = {"encoder": Tokens(IDS, None), "decoder": Tokens(IDS[:2], None)}
    with pytest.raises(ValueError, match="encoder has 3 examples, but the decoder 2"):
        examples(supplied=pairs)


# -- what the backends tell -------------------------------------------------------------------------------------------


def described_by(model, inputs):
    from attn_reg_plugin import ADDrop

    regularizer = ADDrop(sites="*")
    with regularizer.attach(model):
        described = regularizer._attachment._described(model, (), inputs)
    return examples_of(Forward(model, (), inputs, Supplied(), described))


@pytest.mark.parametrize("name", ["bert", "marian", "llama"])
def test_padding_does_not_matter_to_transformers(name):
    model, inputs = huggingface_models.build(name), huggingface_models.batch(name)
    wider = dict(inputs)
    for key, fill in (("input_ids", huggingface_models.PAD), ("attention_mask", 0)):
        wider[key] = nn.functional.pad(inputs[key], (0, 2), value=fill)
    if name == "llama":
        wider["labels"] = nn.functional.pad(inputs["labels"], (0, 2), value=-100)
    assert described_by(model, wider).digests == described_by(model, inputs).digests


def test_padding_does_not_matter_to_fairseq():
    model, inputs = fairseq_models.transformer(), fairseq_models.batch()
    wider = {
        key: nn.functional.pad(value, (3, 0), value=1) if value.dim() > 1 else value for key, value in inputs.items()
    }
    assert described_by(model, wider).digests == described_by(model, inputs).digests


def test_rows_of_multiple_choice_are_examples():
    from transformers import BertConfig, BertForMultipleChoice

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForMultipleChoice(BertConfig(vocab_size=13, **sizes)).train()
    ids = tokens([5, 4, 3, 5], 5).view(2, 2, 5)
    found = described_by(model, {"input_ids": ids, "attention_mask": ids.ne(PAD).long()})
    assert len(set(found.digests)) == 4 and found.lengths("encoder", 5).tolist() == [5, 4, 3, 5]


def test_several_texts_of_transformers():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = huggingface_models.build("bert")

        def forward(self, input_ids, attention_mask, second_input_ids):
            """Never called."""

    ids, model = tokens([5, 3, 2], 5), Pair().train()
    inputs = {"input_ids": ids, "attention_mask": ids.ne(PAD).long(), "second_input_ids": ids.clone()}
    found = described_by(model, inputs)
    assert found.lengths("encoder", 5).tolist() == [5, 5, 5]
    assert not set(found.digests) & set(described_by(model, {**inputs, "second_input_ids": ids + 1}).digests)
