"""Labelled data as a fairseq dataset: padding, batches, order."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.trainer import Trainer

from attn_reg_plugin.labelled import CLASSIFICATION, MULTIPLE_CHOICE, REGRESSION, TAGGING, Encoded
from attn_reg_plugin.labelled.dataset import LabelledDataset
from tests.labelled.tokenizers import bert_tokenizer


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def texts(lengths: Sequence[int], types: bool = False) -> list[Encoded]:
    return [
        Encoded(ids(*range(5, 5 + n)), ids(*[1] * n) if types else None, number % 2) for number, n in enumerate(lengths)
    ]


def batch(dataset: LabelledDataset, *indices: int) -> dict:
    return dataset.collater([dataset[index] for index in indices])


def test_a_batch_is_padded_to_its_own_longest() -> None:
    tokenizer = bert_tokenizer()
    tokenizer._pad_token_type_id = 7
    dataset = LabelledDataset(texts([2, 3, 9], types=True), CLASSIFICATION, tokenizer)
    sample = batch(dataset, 1, 0)
    assert sample["id"].tolist() == [1, 0] and sample["target"].tolist() == [1, 0]
    assert sample["target"].dtype == torch.int64
    assert sample["net_input"]["input_ids"].tolist() == [[5, 6, 7], [5, 6, 0]]
    assert sample["net_input"]["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert sample["net_input"]["token_type_ids"].tolist() == [[1, 1, 1], [1, 1, 7]]
    assert (sample["ntokens"], sample["nsentences"]) == (5, 2)
    assert list(sample["net_input"]) == ["input_ids", "attention_mask", "token_type_ids"]


def test_values_tags_and_choices() -> None:
    values = LabelledDataset([Encoded(ids(5), None, 2.5)], REGRESSION, bert_tokenizer())
    assert batch(values, 0)["target"].tolist() == [2.5] and batch(values, 0)["target"].dtype == torch.float64
    tags = [Encoded(ids(2, 5, 3), None, ids(-100, 4, -100)), Encoded(ids(2), None, ids(-100))]
    sample = batch(LabelledDataset(tags, TAGGING, bert_tokenizer()), 0, 1)
    assert sample["target"].tolist() == [[-100, 4, -100], [-100, -100, -100]]
    assert sample["target"].dtype == torch.int64
    rows = [
        Encoded((ids(5), ids(6, 7)), (ids(0), ids(0, 1)), 1),
        Encoded((ids(8, 9, 10), ids(11)), (ids(0, 0, 1), ids(0)), 0),
    ]
    choices = LabelledDataset(rows, MULTIPLE_CHOICE, bert_tokenizer())
    sample = batch(choices, 0, 1)
    assert sample["net_input"]["input_ids"].tolist() == [[[5, 0, 0], [6, 7, 0]], [[8, 9, 10], [11, 0, 0]]]
    assert sample["net_input"]["token_type_ids"].shape == (2, 2, 3)
    assert sample["target"].tolist() == [1, 0] and sample["ntokens"] == 7
    assert [choices.size(0), choices.size(1)] == [2, 3]
    assert [choices.num_tokens(0), choices.num_tokens(1)] == [4, 6]
    assert choices.num_tokens_vec(np.array([1, 0])).tolist() == [6, 4]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_does_not_round_values(precision: str) -> None:
    common = SimpleNamespace(**{"fp16": False, "bf16": False, precision: True})
    trainer = SimpleNamespace(cfg=SimpleNamespace(common=common))
    sample = batch(LabelledDataset([Encoded(ids(5), None, 4.533)], REGRESSION, bert_tokenizer()), 0)
    assert Trainer._fp_convert_sample(trainer, sample)["target"].item() == 4.533


def test_grouped_batches_hold_like_lengths_and_keep_to_max_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 300).tolist()
    dataset = LabelledDataset(texts(lengths), CLASSIFICATION, bert_tokenizer(), shuffle=True)
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=80)
    assert sorted(index for some in batches for index in some) == list(range(300))
    assert all(batch(dataset, *some)["net_input"]["input_ids"].numel() <= 80 for some in batches)
    padded = sum(batch(dataset, *some)["net_input"]["input_ids"].numel() for some in batches)
    assert padded <= 1.1 * sum(lengths)


@pytest.mark.parametrize("grouped", [True, False])
def test_the_order_depends_on_seed_and_epoch_alone(grouped: bool) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        rows = texts([n % 3 + 1 for n in range(60)])
        dataset = LabelledDataset(rows, CLASSIFICATION, bert_tokenizer(), True, seed, grouped)
        dataset.set_epoch(epoch)
        np.random.random(seed + epoch)  # whatever happened to numpy's generator before
        return dataset.ordered_indices().tolist()

    assert order(1, 2) == order(1, 2)
    assert order(1, 1) != order(1, 2) and order(1, 1) != order(2, 1)
    assert sorted(order(1, 1)) == list(range(60))
    lengths = [index % 3 for index in order(1, 1)]
    assert (lengths == sorted(lengths)) == grouped


def test_without_shuffling_every_epoch_is_the_same() -> None:
    plain = LabelledDataset(texts([3, 1, 2]), CLASSIFICATION, bert_tokenizer(), grouped=False)
    assert plain.ordered_indices().tolist() == [0, 1, 2] and plain.can_reuse_epoch_itr_across_epochs
    grouped = LabelledDataset(texts([3, 1, 2]), CLASSIFICATION, bert_tokenizer())
    assert grouped.ordered_indices().tolist() == [1, 2, 0] and len(grouped) == 3
    assert not LabelledDataset(texts([1]), CLASSIFICATION, bert_tokenizer(), True).can_reuse_epoch_itr_across_epochs


def test_words_are_dropped_anew_in_every_epoch() -> None:
    """By the mask token, at the rate that is asked for; special tokens stay, and an epoch made again is equal."""
    ids_of = {"pad_token_id": 0, "pad_token_type_id": 0, "mask_token_id": 3, "all_special_ids": [0, 3, 5]}
    tokenizer, rows = SimpleNamespace(padding_side="right", **ids_of), texts([9] * 400)
    special = torch.tensor(tokenizer.all_special_ids)
    dataset, plain = (LabelledDataset(rows, CLASSIFICATION, tokenizer, word_dropout=rate) for rate in (0.3, 0.0))
    given = batch(plain, *range(400))["net_input"]["input_ids"]
    epochs = []
    for epoch in (1, 2, 1):
        dataset.set_epoch(epoch)
        epochs.append(batch(dataset, *range(400))["net_input"]["input_ids"])
        dropped = epochs[-1] != given
        assert (epochs[-1][dropped] == tokenizer.mask_token_id).all()
        words = ~torch.isin(given, special)
        assert not (dropped & ~words).any() and 0.26 < dropped[words].double().mean() < 0.34
    assert epochs[0].equal(epochs[2]) and not epochs[0].equal(epochs[1])
    alone = batch(dataset, 7)["net_input"]["input_ids"][0]
    assert alone.equal(epochs[2][7]), "whatever else is in the batch"
    with pytest.raises(ValueError, match="has no mask token"):
        LabelledDataset(rows, CLASSIFICATION, SimpleNamespace(pad_token_id=0, mask_token_id=None), word_dropout=0.1)


def test_no_rows_and_no_padding_token_are_refused() -> None:
    with pytest.raises(ValueError, match="the data set has no examples"):
        LabelledDataset([], CLASSIFICATION, bert_tokenizer())
    with pytest.raises(ValueError, match="has no padding token"):
        LabelledDataset(texts([1]), CLASSIFICATION, bert_tokenizer(pad_token=None))
