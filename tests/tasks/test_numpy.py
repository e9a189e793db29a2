"""fairseq on numpy 2: sentences as blocks, which `fairseq-eval-lm` scores, and batches in buckets."""

from __future__ import annotations

import numpy as np
import torch
from fairseq.data import LanguagePairDataset, ListDataset, TokenBlockDataset, data_utils
from fairseq.modules.dynamic_crf_layer import DynamicCRF

import attn_reg_plugin.tasks  # noqa: F401  importing the face mends fairseq
from tests.backends.fairseq_models import words

SENTENCES = [torch.tensor([4, 5, 2]), torch.tensor([6, 2]), torch.tensor([7, 8, 9, 4, 2])]
SIZES = np.array([len(sentence) for sentence in SENTENCES])


def test_sentences_as_blocks() -> None:
    dataset = TokenBlockDataset(ListDataset(SENTENCES, SIZES), SIZES, None, pad=1, eos=2, break_mode="eos")
    assert [block.tolist() for block in dataset] == [sentence.tolist() for sentence in SENTENCES]


def test_batches_in_buckets() -> None:
    assert data_utils.get_buckets(SIZES, 2).tolist() == [3, 5]
    data = ListDataset(SENTENCES, SIZES)
    dataset = LanguagePairDataset(data, SIZES, words(), data, SIZES, words(), num_buckets=2)
    assert dataset.bucketed_num_tokens.tolist() == [3, 3, 5]


def test_nat_with_a_crf() -> None:
    layer = DynamicCRF(12, low_rank=2, beam_size=3)
    likelihood = layer(torch.randn(2, 4, 12), torch.randint(12, (2, 4)), torch.ones(2, 4).bool())
    assert likelihood.shape == (2,) and likelihood.isfinite().all()


def test_numpy_itself_stays_as_it_is() -> None:
    assert data_utils.np.float64 is np.float64 and (hasattr(np, "compat") == hasattr(np, "int"))
