"""R-Drop and HiddenCut against literal evaluations of their losses; a batch of one's own, and what is refused."""

import math
from collections import UserDict
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from attn_reg_plugin.regularizers import Supplied, build
from attn_reg_plugin.regularizers.base.repeated_batch import repeated, runs_on_repeated
from attn_reg_plugin.regularizers.hidden_cut import Spans, drawn_spans
from tests.attention.tiny_model import PAD, Around, TinyClassifier, attentions, loss_of, tokens

EACH = pytest.mark.parametrize("name", ["r_drop", "hidden_cut"])
IDS, LABELS = tokens([6, 3, 5], 6, seed=4), torch.tensor([2, 0, 1])


def classifier(dropout=0.3, classes=3):
    torch.manual_seed(5)
    return TinyClassifier(dropout, classes).train()


def divergence(name, first, second):
    """Divergence of two rows of logits, number by number: both KL, or those to their middle, halved."""
    p, q = ([math.exp(x) / sum(math.exp(y) for y in row) for x in row.tolist()] for row in (first, second))
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    pairs = [(p, middle), (q, middle)] if name == "hidden_cut" else [(p, q), (q, p)]
    return sum(a * math.log(a / b) for pair in pairs for a, b in zip(*pair, strict=True)) / 2


@EACH
@pytest.mark.parametrize("weight", [0.5, 5.0])
def test_the_loss_is_that_of_both_passes_and_their_divergence(name, weight):
    model = Around(classifier())
    regularizer = build(name, weight=weight)
    with regularizer.attach(model):
        batch = {"ids": IDS, "labels": LABELS}
        loss = regularizer.loss(lambda b: F.cross_entropy(model(b["ids"]), b["labels"]), batch)
    first, second = model.outputs[-1].detach().double().chunk(2)
    assert len(model.outputs) == 1 and len(first) == 3 and not first.allclose(second)
    likelihood = sum(F.cross_entropy(half, LABELS).item() for half in (first, second))
    divergences = [divergence(name, a, b) for a, b in zip(first, second, strict=True)]
    assert sum(divergences) > 1e-3
    assert loss.item() == pytest.approx(likelihood + weight * sum(divergences) / 3, rel=1e-5)
    assert float(regularizer.statistics.take()[f"{name}_divergence"]) == pytest.approx(sum(divergences), rel=1e-4)


@EACH
def test_of_tokens_those_with_a_label_count(name, dropping_translator, batch):
    model, regularizer = Around(dropping_translator), build(name, weight=2.0)
    with regularizer.attach(model):
        regularizer.supply(targets=batch[1], token_mask=batch[1].ne(PAD))
        loss = regularizer.loss(lambda b: loss_of(model(*b), b[1]), batch)
        assert regularizer.supplied == Supplied(targets=batch[1], token_mask=regularizer.supplied.token_mask)
    first, second = model.outputs[-1].detach().double().chunk(2)
    places = batch[1].ne(PAD).nonzero().tolist()
    likelihood = sum(loss_of(half, batch[1]).item() for half in (first, second))
    mean = sum(divergence(name, first[b, t], second[b, t]) for b, t in places) / len(places)
    assert loss.item() == pytest.approx(likelihood + 2 * mean, rel=1e-5)


@pytest.mark.parametrize("part", ["the model", "a part of it"])
def test_methods_that_were_attached_by_themselves_hear_of_the_repeated_batch(part, dropping_translator, batch):
    """AD-DROP beside R-Drop counts the tokens that it counts in their combination."""
    seen = []

    def objective(outputs, inputs):
        seen.append((outputs.shape[:2], inputs["token_mask"]))
        return outputs.sum()

    beside, regularizer = build("ad_drop", cross_tuning="off", objective=objective), build("r_drop")
    mask = batch[1].ne(PAD)
    whole = dropping_translator if part == "the model" else Around(dropping_translator)
    with beside.attach(dropping_translator), regularizer.attach(whole):
        for one in (beside, regularizer):
            one.supply(token_mask=mask)
        regularizer.loss(lambda b: loss_of(whole(*b), b[1]), batch)
        assert beside.supplied.token_mask is mask and regularizer.supplied.token_mask is mask
        with pytest.raises(ValueError, match="r_drop and hidden_cut each run the batch several times"):
            build("hidden_cut").attach(whole)
    [(shape, found)] = seen
    assert found.shape == shape and found.equal(torch.cat([mask, mask]))


@EACH
def test_a_regression_diverges_by_the_squared_difference(name):
    model, gold, regularizer = Around(classifier(classes=1)), torch.randn(3), build(name)
    with regularizer.attach(model):
        loss = regularizer.loss(lambda b: F.mse_loss(model(b[0]).squeeze(-1), b[1]), (IDS, gold))
    first, second = model.outputs[-1].detach().squeeze(-1).chunk(2)
    expected = (first - gold) ** 2 + (second - gold) ** 2 + (first - second) ** 2
    assert loss.item() == pytest.approx(expected.mean().item(), rel=1e-5)


class Answering(TinyClassifier):
    """Answers questions by a first and a last token."""

    def forward(self, ids):
        start = end = super().forward(ids)
        return {"start_logits": start, "end_logits": end}


@EACH
def test_what_cannot_be_compared_is_refused(name):
    """A loop that does not ask for the loss; labels of which several hold; a loss of nothing; spans."""
    model, several = classifier(), {"ids": IDS, "labels": torch.rand(3, 3)}
    with build(name).attach(model) as regularizer:
        with pytest.raises(RuntimeError, match=rf"^{name} adds to the loss of a batch: compute it by regularizer.loss"):
            model(IDS)
        model.eval()(IDS)
        with torch.no_grad():
            model.train()(IDS)
        with pytest.raises(ValueError, match="labels of which several may hold cannot be compared"):
            regularizer.loss(lambda b: model(b["ids"], b["labels"]).sum(), several)
        with pytest.raises(RuntimeError, match="saw no forward of the attached model"):
            regularizer.loss(lambda b: torch.zeros((), requires_grad=True), IDS)
        regularizer.loss(lambda b: model(b).logsumexp(-1).mean(), IDS).backward()
    model(IDS)
    answering = Answering(0.1).train()
    said = r"no logits of classes or tokens; use a method that asks nothing of them, such as attention_dropout"
    with build(name).attach(answering) as regularizer, pytest.raises(ValueError, match=said):
        regularizer.loss(lambda b: answering(b)["start_logits"].sum(), IDS)


class TimeFirst(Around):
    """Gives logits (T, B, V)."""

    def forward(self, *args):
        return super().forward(*args).transpose(0, 1)


@EACH
def test_logits_of_another_order_are_refused(name, translator):
    """Halves of their first dimension would be halves of the sentences."""
    model, pairs = TimeFirst(translator), [tokens([6, 3, 5, 4], 6, seed=seed) for seed in (4, 5)]
    with build(name).attach(translator) as regularizer:  # but forwards of parts of the batch are not
        regularizer.loss(lambda b: sum(translator(*(ids[i::4] for ids in b)).mean() for i in range(4)), pairs)
    with build(name).attach(model) as regularizer:
        regularizer.supply(token_mask=pairs[1].ne(PAD).T)
        said = r"logits of shape \(6, 8, \d+\) cannot be compared; give \(B, C\), \(B, T, V\)"
        with pytest.raises(ValueError, match=said):
            regularizer.loss(lambda b: model(*b).logsumexp(-1).mean(), pairs)


class Transposed(Around):
    """Takes tokens as (T, B)."""

    def forward(self, ids):
        return super().forward(ids.T)


@EACH
def test_rows_that_are_no_examples_are_not_repeated(name):
    """Of four texts of six tokens, six rows of the first tensor; the other's four would be compared with each other."""
    model, ids = Transposed(classifier()), tokens([6, 3, 5, 4], 6, seed=4)
    with (
        build(name).attach(model) as regularizer,
        pytest.raises(ValueError, match=r"first tensor has 6 rows.*gives 4 rows"),
    ):
        regularizer.loss(lambda b: model(b[0]).logsumexp(-1).mean(), (ids.T, torch.zeros(4)))


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor
    labels: torch.Tensor
    lengths: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "lengths", self.ids.ne(PAD).sum(-1))


def test_what_has_as_many_rows_as_the_first_tensor_is_repeated():
    given = {"n": 3, "ids": IDS, "more": [LABELS, (torch.eye(6), "text")], "scalar": torch.tensor(1.0)}
    twice = repeated({**given, "held": [Batch(IDS, LABELS)]})
    assert twice["ids"].equal(torch.cat([IDS, IDS])) and twice["more"][0].tolist() == [2, 0, 1] * 2
    assert twice["more"][1][0].shape == (6, 6) and (twice["n"], twice["more"][1][1]) == (3, "text")
    assert twice["scalar"] == 1 and given["ids"] is IDS
    held = twice["held"][0]
    assert type(held) is Batch and held.ids.equal(twice["ids"]) and held.labels.tolist() == [2, 0, 1] * 2
    encoding = repeated(UserDict(ids=IDS))
    assert type(encoding) is UserDict and encoding["ids"].equal(twice["ids"])
    assert held.lengths.tolist() == IDS.ne(PAD).sum(-1).tolist() * 2


RUNS = {
    "another batch": lambda model, batch: model(IDS[:2].repeat(2, 1)[:3]),
    "the batch as it was": lambda model, batch: model(IDS),
    "a table first": lambda model, batch: model(batch["ids"]),
    "by keyword, nested": lambda model, batch: model.model(ids=[{"ids": IDS}][0]["ids"]),
}


@pytest.mark.parametrize("how", RUNS)
@EACH
def test_a_forward_that_is_not_of_the_repeated_batch_is_refused(name, how):
    """The forward's first and second half are unlike examples."""
    model, regularizer = Around(classifier()), build(name)
    batch = {"table": torch.ones(50)} if how == "a table first" else {}
    batch["ids"] = IDS
    said = f"^{name} repeats the batch, but TinyClassifier runs on one that is not repeated: run the model on the batch"
    with regularizer.attach(model.model):
        with pytest.raises(ValueError, match=said):
            regularizer.loss(lambda b: RUNS[how](model, b).logsumexp(-1).mean(), batch)
        with pytest.raises(ValueError, match=f"{name} repeats the tensors of a batch, but finds none in this object"):
            regularizer.loss(lambda b: model(IDS).logsumexp(-1).mean(), object())


def test_parts_of_the_repeated_batch_are_not_refused():
    """Texts of a pair, one after the other; those of several choices, flattened; what is time-first."""
    pairs, choices = IDS[[0, 0, 1, 1]], IDS.unsqueeze(1).expand(3, 4, 6)
    model, regularizer = classifier(), build("r_drop")
    with regularizer.attach(model):
        regularizer.loss(lambda b: (model(b[0::2]) + model(b[1::2])).logsumexp(-1).mean(), pairs)
        regularizer.loss(lambda b: model(b.flatten(0, 1)).view(6, 4, 3).logsumexp(-1).mean(), choices)
    assert regularizer.statistics.take()["r_drop_items"] == 4 + 12
    time_first = [torch.randint(9, (3, 3)).repeat(1, 2), torch.ones(3, dtype=torch.long)]
    assert runs_on_repeated(iter(time_first[:1]), [IDS]) and runs_on_repeated(iter([]), [IDS])
    assert not runs_on_repeated(iter(time_first), [IDS])


def literal_spans(row, length, cut, top, draw):
    """The authors' code, for an example without padding on its left: the span that begins at the drawn token."""
    among = max(int(length * top), 1)
    order = sorted(range(length), key=lambda i: -row[i])[:among]
    start = order[int(draw * among)]
    return set(range(start, min(start + max(int(length * cut), 1), length)))


@pytest.mark.parametrize("cut, top", [(0.1, 0.4), (0.3, 0.5), (1.0, 1.0), (0.5, 0.0)])
def test_a_span_begins_among_the_most_attended_tokens(cut, top):
    lengths = [10, 7, 4, 1]
    received = torch.rand(4, 10, generator=torch.Generator().manual_seed(2))
    real = torch.arange(10) < torch.tensor(lengths).unsqueeze(-1)
    for seed in range(5):
        draws = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
        spans = drawn_spans(received, real, cut, top, torch.Generator().manual_seed(seed))
        for span, row, length, draw in zip(spans, received.tolist(), lengths, draws, strict=True):
            assert set(span.nonzero().flatten().tolist()) == literal_spans(row, length, cut, top, draw)


def test_the_second_pass_loses_its_spans_in_every_layer(monkeypatch):
    """Spans are cut out of the feed-forward network's output, by the attention of that layer."""
    model, maps, outputs, look = classifier(0.0), [], [], Spans.__call__
    for layer in model.encoder.layers:
        layer.feed_forward.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    monkeypatch.setattr(Spans, "__call__", lambda *given: (maps.append((given[0].seed, given[2])), look(*given)))
    regularizer = build("hidden_cut", cut=0.4, top=0.5)
    with regularizer.attach(model):
        torch.manual_seed(3)
        regularizer.loss(lambda b: model(b).logsumexp(-1).mean(), IDS).backward()
        sums = regularizer.statistics.take()
    assert all("forward" not in vars(module) for module in model.modules()) and len(maps) == 2
    real, cut = IDS.ne(PAD).repeat(2, 1), 0
    for output, (seed, weights) in zip(outputs, maps, strict=True):
        received = (weights * real[:, None, :, None]).sum(2).mean(1)
        draws = torch.rand(6, generator=torch.Generator().manual_seed(seed)).tolist()
        for b in range(6):
            zero = set((output[b] == 0).all(-1).nonzero().flatten().tolist())
            length, cut = int(real[b].sum()), cut + len(zero)
            assert zero == (literal_spans(received[b].tolist(), length, 0.4, 0.5, draws[b]) if b > 2 else set())
    assert sums["tokens_cut"] == cut and sums["tokens"] == real.sum()


@pytest.mark.parametrize("sites", ["decoder.cross", "*"])
def test_only_self_attentions_have_tokens_to_cut(sites, translator):
    with pytest.raises(ValueError, match="is no self-attention"):
        build("hidden_cut", sites=sites).attach(translator)
    assert not any(site.site.attached for site in attentions(translator).values())
