"""F of the whole step: where outputs hold none, the loss of all forwards is what is attributed."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import Combination, build, whole_step
from attn_reg_plugin.regularizers.attachment import attachments_of, begin_step
from attn_reg_plugin.regularizers.objectives import NoObjective, OfOutputs, negative_loss
from attn_reg_plugin.regularizers.whole_step import WholeStepWanted
from tests.attention.tiny_model import PAD, SIZE, TinyStack, sharpened, tokens

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = tokens([6, 3, 2], 6, seed=1), tokens([4, 1, 3], 4, seed=2)


class Embedder(nn.Module):
    """A text to one vector, or with `pairs` both texts in one forward."""

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        self.encoder = TinyStack("encoder", 2, 0.0)
        self.output = nn.Linear(SIZE, 3)
        self.pairs, self.checkpointed = pairs, False

    def embedded(self, text: torch.Tensor) -> torch.Tensor:
        given = text, text.ne(PAD)[:, None, None, :]
        states = checkpoint(self.encoder, *given, use_reentrant=False) if self.checkpointed else self.encoder(*given)
        return self.output(states[:, 0])

    def forward(self, *texts: torch.Tensor) -> dict[str, torch.Tensor]:
        names = ("first", "second") if self.pairs else ("sentence_embedding",)
        return dict(zip(names, map(self.embedded, texts), strict=True))


def embedder(pairs: bool = False) -> Embedder:
    torch.manual_seed(4)
    return sharpened(Embedder(pairs)).train()


def loss_of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(first @ second.T, torch.arange(len(first)))


def in_one_forward(model: Embedder) -> torch.Tensor:
    outputs = model(*TEXTS)
    return loss_of(outputs["first"], outputs["second"])


def in_two_forwards(model: Embedder) -> torch.Tensor:
    first = model(TEXTS[0])["sentence_embedding"]
    with torch.no_grad():
        model(TEXTS[1])  # as a trainer's reference, which is no part of the step's graph
    return loss_of(first, model(TEXTS[1])["sentence_embedding"])


def step(model: Embedder, regularizer, loss=in_two_forwards):
    """Loss and gradients of a step, as a face runs it."""
    model.zero_grad()
    regularizer.supply(training_loss=lambda: loss(model))
    torch.manual_seed(1)
    try:
        begin_step(model)
        found = loss(model)
    except WholeStepWanted:
        torch.manual_seed(1)
        begin_step(model)
        found = loss(model)
    found.backward()
    regularizer.supply()
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"attribution": "integrated", "integrated_steps": 2}, {"attribution": "attention"}], ids=str
)
def test_two_forwards_are_masked_as_one_is(options, checkpointed, caplog):
    """q = 1 drops the candidates of the loss, which are the same however the forwards are called."""
    pairs, apart = embedder(pairs=True), embedder()
    apart.checkpointed = checkpointed
    both = lambda outputs, inputs: -loss_of(outputs["first"], outputs["second"])  # noqa: E731
    with ADDrop(p=0.5, q=1.0, cross_tuning="off", objective=both, **options).attach(pairs) as regularizer:
        expected = step(pairs, regularizer, in_one_forward)
        dropped = regularizer.statistics.take()
    plain = step(apart, build("ad_drop", p=0.0))
    for _ in range(2):  # the first finds out that the step is needed
        with caplog.at_level(logging.WARNING):
            regularizer = ADDrop(p=0.5, q=1.0, cross_tuning="off", **options)
            with regularizer.attach(apart):
                for _ in range(2):
                    regularizer.statistics.take()
                    torch.testing.assert_close(step(apart, regularizer), expected)
                counted = regularizer.statistics.take()
    assert counted["forwards"] == counted["regularized"] == 2
    assert {key: value for key, value in counted.items() if "encoder" in key} == {
        key: value for key, value in dropped.items() if "encoder" in key
    }
    assert not torch.equal(plain[0], expected[0])
    assert "minus the training loss of the whole step, by a probe of it: the outputs have no logits" in caplog.text


def test_another_method_acts_in_every_forward_of_the_step():
    model = embedder()
    combined = Combination([build("ad_drop", p=0.5, q=1.0, cross_tuning="off"), build("head_drop", p=0.5)])
    with combined.attach(model):
        (first, gradients), (again, _) = step(model, combined), step(model, combined)
        counted = combined.statistics.take()
    assert first.equal(again) and all(gradient.isfinite().all() for gradient in gradients.values())
    assert counted["dropped/encoder.self[0]"] > 0
    with ADDrop(p=0.5, q=1.0, cross_tuning="off").attach(model) as alone:
        assert not step(model, alone)[0].equal(first)
    assert step(model, build("ad_drop", p=0.0))[0].isfinite()


def test_a_plain_step_says_at_the_start_what_is_wrong_and_changes_nothing():
    model = embedder()
    plain = step(model, build("ad_drop", p=0.0))
    regularizer = ADDrop(p=0.5, q=1.0, cross_tuning="epoch")
    regularizer.begin_epoch(1)
    with regularizer.attach(model):
        torch.testing.assert_close(step(model, regularizer), plain, rtol=0, atol=0)
        regularizer.begin_epoch(2)
        assert not step(model, regularizer)[0].equal(plain[0])
    regularizer.begin_epoch(1)
    with (
        regularizer.attach(model),
        pytest.raises(ValueError, match=r"type dict; give an objective=.*it has sentence_embedding, .*AttnRegCallback"),
    ):
        in_two_forwards(model)


def test_a_loss_that_runs_the_model_inside_its_backward_is_refused():
    class Cached(torch.autograd.Function):
        @staticmethod
        def forward(ctx, embedding, model):
            ctx.model = model
            return embedding.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                ctx.model(TEXTS[0])["sentence_embedding"].backward(gradient)
            return gradient, None

    def cached(model):
        with torch.no_grad():
            embedding = model(TEXTS[0])["sentence_embedding"]
        return Cached.apply(embedding.requires_grad_(), model).square().sum()

    rehearsing = ADDrop(p=0.5, cross_tuning="update:1")  # the first update is plain
    for regularizer in (rehearsing, ADDrop(p=0.5, cross_tuning="off"), build("attention_dropout", p=0.4)):
        model = embedder()
        with regularizer.attach(model), pytest.raises((ValueError, RuntimeError), match="runs again inside a backward"):
            step(model, regularizer, cached)


def test_a_sharded_model_is_refused(monkeypatch):
    """FSDP2 gives modules this method."""
    model, regularizer = embedder(), ADDrop(p=0.5, cross_tuning="off")
    monkeypatch.setattr(TinyStack, "set_requires_gradient_sync", lambda self, flag: None, raising=False)
    with regularizer.attach(model), pytest.raises(ValueError, match="cannot be probed where FSDP2 shards the model"):
        step(model, regularizer)


@pytest.mark.parametrize("known", [True, False])
def test_a_second_forward_does_not_take_the_masks_that_checkpointing_wants_again(known):
    """Also where a model checkpoints its own way, so that it isn't known before the backward."""
    model = embedder()
    model.checkpointed, model.gradient_checkpointing = True, known
    regularizer = build("attention_dropout", p=0.4, where="scores")
    with regularizer.attach(model):
        with pytest.raises(RuntimeError, match="Embedder runs several times in a training step, and activation"):
            step(model, regularizer)
        regularizer.supply()
        model.zero_grad()
        torch.manual_seed(1)
        first = model(TEXTS[0])["sentence_embedding"].sum()
        with torch.no_grad():
            model(TEXTS[1])
        first.backward()
        between = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        torch.manual_seed(1)
        model(TEXTS[0])["sentence_embedding"].sum().backward()
    torch.testing.assert_close(between, {name: p.grad for name, p in model.named_parameters()}, rtol=0, atol=0)


# -- what outputs hold ------------------------------------------------------------------------------------------------

LOGITS = torch.tensor([[2.0, 1.0, 0.5], [0.1, 0.7, 0.2]])
LIKELIHOODS = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]])
REWARDS, LOSS = torch.tensor([[3.0], [1.0]]), torch.tensor(0.25, requires_grad=True)
#: outputs, what else is known, F, and where the log says that it comes from
FOUND = {
    "logits": ({"logits": LOGITS, "log_probs": LIKELIHOODS, "loss": LOSS}, {}, 2.7, "the pseudo labels' logits"),
    "log_probs": ({"log_probs": LIKELIHOODS, "loss": LOSS, "logits": None}, {}, -3.5, "the outputs' log_probs"),
    "of classes": (
        {"log_probs": LOGITS.log_softmax(-1)},
        {"labels": torch.tensor([0, 1])},
        LOGITS.log_softmax(-1).amax(-1).sum().item(),
        "the outputs' log_probs",
    ),
    "scores": ({"scores": LOGITS, "loss": LOSS}, {}, 2.7, "the outputs' scores"),
    "one score, graded": ({"scores": REWARDS}, {"labels": torch.tensor([2.0, 1.0])}, 4.0, "the outputs' scores"),
    "one score": ({"scores": REWARDS, "loss": LOSS}, {}, -0.25, "minus the loss that the forward returns"),
    "rewards": ({"logits": REWARDS, "loss": LOSS}, {}, -0.25, "which has no pseudo label, and there is no gold value"),
    "embeddings": ({"embedding": LOGITS, "loss": LOSS}, {}, -0.25, "the outputs have no logits"),
    "a map": ({"logits": LOGITS.view(2, 1, 3, 1), "loss": LOSS}, {}, -0.25, r"logits of shape (2, 1, 3, 1)"),
}


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("form", [dict, lambda **held: SimpleNamespace(**held)], ids=["mapping", "object"])
def test_what_is_attributed_and_that_the_log_says_so(found, form, caplog):
    held, inputs, expected, words = FOUND[found]
    objective = OfOutputs()
    with caplog.at_level(logging.INFO):
        values = [objective(form(**held), inputs).item() for _ in range(2)]
    assert values == pytest.approx([expected] * 2)
    assert [words in record.message for record in caplog.records] == [True], "once"
    assert caplog.records[0].levelno == (logging.INFO if found == "logits" else logging.WARNING)


@pytest.mark.parametrize("held", [{"embedding": LOGITS}, {"logits": REWARDS}, {"scores": REWARDS}, {"loss": LOGITS}])
def test_what_holds_nothing_is_left_to_the_step(held):
    for objective in (OfOutputs(), OfOutputs("gold"), negative_loss):
        with pytest.raises(NoObjective):
            objective(held, {})


# -- several methods, checkpointing and half precision -----------------------------------------------------------------


@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0)])
def test_callbacks_in_any_order_probe_the_step_once(order: tuple[int, ...]) -> None:
    """A callback's step runs within the later one's; what one has made for the step, the other one leaves alone."""
    probing = ADDrop(p=0.5, q=1.0, cross_tuning="off", sites="encoder.self[0]")
    drawing = build("attention_dropout", p=1e-4, where="scores", sites="encoder.self[1]")
    methods, model, probes = [(probing, drawing)[i] for i in order], embedder(), []

    def loss_through(callbacks: list) -> torch.Tensor:
        if not callbacks:
            return in_two_forwards(model)
        *inner, method = callbacks

        def training_loss() -> torch.Tensor:
            probes.append(method)
            others = [(one.regularizer, one.regularizer.supplied) for one in attachments_of(model)]
            loss = loss_through(inner)
            for other, told in others:
                other.supply(told)
            return loss

        method.supply(training_loss=training_loss)
        try:
            begin_step(model)
            return loss_through(inner)
        except WholeStepWanted:
            begin_step(model)
            return loss_through(inner)

    for method in methods:
        method.attach(model)
    for _ in range(2):
        probes.clear()
        for method in methods:
            method.supply()
        torch.manual_seed(1)
        loss = loss_through(methods)
    alone, regularizer = embedder(), ADDrop(p=0.5, q=1.0, cross_tuning="off", sites="encoder.self[0]")
    with regularizer.attach(alone):
        step(alone, regularizer)
        expected, _ = step(alone, regularizer)
    assert probes.count(probing) == 1
    torch.testing.assert_close(loss.detach(), torch.as_tensor(expected))


def test_a_schedule_that_starts_at_zero_waits_beside_a_probe_of_the_step() -> None:
    schedule = build("scheduled_dropout", schedule="drop encoder.self: 0:0 10:0.5", sites="encoder.self[1]")
    together = Combination([ADDrop(p=0.5, q=1.0, cross_tuning="off", sites="encoder.self[0]"), schedule])
    model = embedder()
    with together.attach(model):
        assert torch.as_tensor(step(model, together)[0]).isfinite()


def test_checkpointing_of_the_whole_model_may_run_it_in_the_backward() -> None:
    """Its first run had gradients and masks; it is one that had none, such as a cached loss's, that is refused."""
    model, gradients = embedder(), []

    class Around(nn.Module):
        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return model(text)["sentence_embedding"] * 1.0

    with build("attention_dropout", p=0.4, where="scores").attach(model):
        for again in (False, True):
            model.zero_grad()
            torch.manual_seed(1)
            output = checkpoint(Around(), TEXTS[0], use_reentrant=False) if again else Around()(TEXTS[0])
            output.square().sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients)


def test_weights_that_are_dropped_anew_are_no_reason_to_refuse_checkpointing() -> None:
    model, regularizer = embedder(), build("attention_dropout", p=0.4, where="weights")
    model.gradient_checkpointing = True
    with regularizer.attach(model):
        assert torch.as_tensor(step(model, regularizer)[0]).isfinite()


def test_attention_in_fp16_is_scaled_for_whatever_the_outputs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, dtypes, plain = embedder(), [], Embedder.forward
    scaled = whole_step.scale_against_underflow
    monkeypatch.setattr(
        whole_step, "scale_against_underflow", lambda f, dtype: (dtypes.append(dtype), scaled(f, dtype))[1]
    )

    def half(text: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.float16):
            outputs = plain(model, text)
        return {name: value.float() for name, value in outputs.items()}

    model.forward, regularizer = half, ADDrop(p=0.5, q=1.0, cross_tuning="off")
    with regularizer.attach(model):
        step(model, regularizer)
    assert dtypes == [torch.float16]
