"""The candidates of a bfloat16 probe are those of an fp32 one, on nearly every position."""

from __future__ import annotations

import pytest
import torch

from attn_reg_plugin import ADDrop

transformers = pytest.importorskip("transformers")


@pytest.mark.slow
def test_candidates_of_both_probes_agree_on_97_percent(one_thread: None) -> None:
    """A BERT of the base shape, 12 layers 768 wide, and sentences of 32 to 64 tokens."""
    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config).train()
    tokens = torch.randint(5, 1000, (4, 64))
    there = torch.arange(64) < torch.tensor([64, 56, 40, 32]).unsqueeze(1)
    kept = {}
    for dtype in ("same", "bfloat16"):
        regularizer = ADDrop(p=0.3, q=1.0, cross_tuning="off", probe_dtype=dtype)  # what is not kept is a candidate
        with regularizer.attach(model):
            model(input_ids=tokens.masked_fill(~there, 0), attention_mask=there.long())
            kept[dtype] = [site.keep & there[:, None, None] for site in regularizer.attached_sites]
    agree, total = 0, 0
    for layer, (ours, theirs) in enumerate(zip(kept["same"], kept["bfloat16"], strict=True)):
        counts = there[:, None, :, None] & there[:, None, None, :]
        if layer == config.num_hidden_layers - 1:
            counts = counts & (torch.arange(64) == 0)[:, None]  # the head reads the first row alone
        counts = counts.expand_as(ours)
        assert (counts & ~ours).any()
        agree += int((ours == theirs)[counts].sum())
        total += int(counts.sum())
    print(f"{agree / total:.4f} of {total} positions")
    assert agree >= 0.97 * total
