"""R-Drop under fairseq against a literal evaluation of its equation 4, and what is logged of it."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest
import torch

from tests.backends.fairseq_models import transformer
from tests.tasks.fairseq_runs import train
from tests.tasks.tasks_in_process import attached, sample, step

WEIGHT, PAD = 0.7, 1


def literal(first: list[float], second: list[float], label: int, smoothing: float) -> tuple[float, float, float]:
    """Of one position: both passes' losses and negative log-likelihoods added, and half of both divergences."""
    passes = [[math.exp(x) / sum(math.exp(y) for y in row) for x in row] for row in (first, second)]
    p, q = passes
    one = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    other = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    likelihood = -math.log(p[label]) - math.log(q[label])
    spread = smoothing / (len(p) - 1)
    smooth = -sum(math.log(chance) for row in passes for chance in row)
    return (1 - smoothing - spread) * likelihood + spread * smooth, likelihood, (one + other) / 2


def test_the_loss_is_that_of_both_passes_and_their_divergence() -> None:
    model, batch = transformer(dropout=0.3), sample()
    task = attached(model, attn_reg="r_drop", r_drop_weight=WEIGHT)
    loss, log = step(task, model, batch)
    assert log["ntokens"] == batch["ntokens"] and log["nsentences"] == 3 and log["sample_size"] == batch["ntokens"]
    assert batch["target"].shape == (3, 6), "the sample stays as it is"
    task.regularizer.detach()
    torch.manual_seed(11)
    twice = {name: torch.cat([value, value]) for name, value in batch["net_input"].items()}
    first, second = model.train()(**twice)[0].detach().double().chunk(2)
    places = batch["target"].ne(PAD).nonzero().tolist()
    terms = [literal(first[b, t].tolist(), second[b, t].tolist(), int(batch["target"][b, t]), 0.1) for b, t in places]
    smooth, likelihood, divergence = (sum(column) for column in zip(*terms, strict=True))
    assert divergence > 0.1
    assert loss == pytest.approx(smooth + WEIGHT * divergence, rel=1e-5)
    assert float(log["nll_loss"]) == pytest.approx(likelihood / 2, rel=1e-5)
    assert float(log["attn_reg/r_drop_divergence"]) == pytest.approx(divergence, rel=1e-5)


@pytest.mark.slow
def test_accumulated_batches_bleu_and_validation(corpus: Path, tmp_path: Path) -> None:
    """Losses are logged in base 2; validation is the plain criterion's."""
    flags = shlex.split("--lr 1e-30 --label-smoothing 0 --update-freq 2 --max-epoch 1 --eval-bleu --eval-bleu-args")
    flags += ['{"beam":1}']
    r_drop = ["--attn-reg", "r_drop", "--r-drop-weight", "3"]
    ours = train(corpus, tmp_path / "ours", *flags, *r_drop, without=["--disable-validation"]).check()
    plain = train(corpus, tmp_path / "plain", *flags, without=["--disable-validation"]).check()
    assert len(ours.lines()) == 3
    for line in ours.lines():
        assert float(line["r_drop"]) > 0
        whole = 2 * float(line["nll_loss"]) + 3 * float(line["r_drop"]) / math.log(2)
        assert float(line["loss"]) == pytest.approx(whole, abs=5e-3)
    (mine,), (stock,) = ours.lines("valid"), plain.lines("valid")
    for name in ("valid_loss", "valid_nll_loss", "valid_ppl", "valid_bleu"):
        assert mine[name] == stock[name]
