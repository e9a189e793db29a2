"""Trainings of tiny models by every registered method: its cases, and what an update of it gives."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_reg_plugin.regularizers import REGISTRY, Outcome, Regularizer, Tokens, build
from tests.attention.tiny_model import PAD, TinyTranslator, loss_of, sharpened, tokens
from tests.comparing import differing
from tests.regularizers.registered import besides

BATCH = tokens([6, 4, 2], 6, seed=1), tokens([3, 5, 1], 5, seed=2)
OTHER = tokens([4, 6], 6, seed=5), tokens([2, 5], 5, seed=6)
ALWAYS = {"p": 0.5, "q": 0.9, "cross_tuning": "off"}
SELF = {"sites": "encoder.self decoder.self"}


class Case(NamedTuple):
    """A method, options with which it has nothing to do, and options with which it has."""

    method: str
    idle: dict[str, Any] | None
    options: dict[str, Any]

    @property
    def all_options(self) -> dict[str, Any]:
        """The options, with every site where they name none."""
        return on_all_sites(self.method, self.options)


def on_all_sites(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, or those of each method of a combination, with every site where they name none."""
    if "+" in method:
        return {one: on_all_sites(one, options.get(one, {})) for one in method.split("+")}
    return {**({"sites": "*"} if REGISTRY[method].needs_sites else {}), **options}


def _together(*names: str, idle: dict[str, Any], **options: dict[str, Any]) -> Case:
    return Case("+".join(names), idle, options)


#: AttendOut has no option that leaves it nothing to do
CASES = {
    "gradient": Case("ad_drop", {**ALWAYS, "p": 0.0}, {**ALWAYS, "cross_tuning": "update:2"}),
    "integrated": Case(
        "ad_drop",
        {**ALWAYS, "q": 0.0, "attribution": "integrated"},
        {**ALWAYS, "attribution": "integrated", "integrated_steps": 2, "integrated_path": "joint"},
    ),
    "attention": Case(
        "ad_drop", {**ALWAYS, "p": 0.0, "attribution": "attention"}, {**ALWAYS, "attribution": "attention"}
    ),
    "random": Case("ad_drop", {**ALWAYS, "q": 0.0, "attribution": "random"}, {**ALWAYS, "attribution": "random"}),
    "tokens": Case("ad_drop", {**ALWAYS, "p": 0.0, "unit": "token"}, {**ALWAYS, "unit": "token"}),
    "random tokens": Case(
        "ad_drop",
        {**ALWAYS, "q": 0.0, "unit": "token", "attribution": "random"},
        {**ALWAYS, "unit": "token", "attribution": "random"},
    ),
    "attend_out": Case("attend_out", None, {"steps": 2}),
    "weights": Case("attention_dropout", {"p": 0.0}, {"p": 0.5}),
    "scores": Case("attention_dropout", {"p": 0.0, "where": "scores"}, {"p": 0.5, "where": "scores"}),
    "attention_layer_drop": Case("attention_layer_drop", {"p": 0.0}, {"p": 0.5}),
    "head_drop": Case("head_drop", {"p": 0.0}, {"p": 0.7, "turn": 4, "end": 8}),
    "hidden_cut": Case("hidden_cut", {"cut": 0.0}, {"cut": 0.5, **SELF}),
    "layer_drop": Case("layer_drop", {"p": 0.0}, {"p": 0.5}),
    "r_drop": Case("r_drop", {"weight": 0.0}, {"weight": 1.0}),
    "scheduled_dropout": Case(
        "scheduled_dropout", {"schedule": "drop *: 0:0"}, {"schedule": "drop *: 0:0.5 4:0.1; drop decoder: 1:0 3:0.7"}
    ),
    "all on one attention": _together(
        *("ad_drop", "head_drop", "attention_dropout", "layer_drop", "attention_layer_drop"),
        idle={"ad_drop": {"p": 0.0, "cross_tuning": "off"}}
        | {name: {"p": 0.0} for name in ("head_drop", "attention_dropout", "layer_drop", "attention_layer_drop")},
        ad_drop=ALWAYS,
        head_drop={"p": 0.5},
        attention_dropout={"p": 0.3},
        layer_drop={"p": 0.3},
        attention_layer_drop={"p": 0.3},
    ),
    "probe and two passes": _together(
        *("ad_drop", "hidden_cut", "scheduled_dropout"),
        idle={
            "ad_drop": {"q": 0.0, "cross_tuning": "off", **SELF},
            "hidden_cut": {"cut": 0.0, **SELF},
            "scheduled_dropout": {"schedule": "drop *: 0:0", "sites": "decoder.cross"},
        },
        ad_drop={**ALWAYS, **SELF},
        hidden_cut={"cut": 0.5, **SELF},
        scheduled_dropout={"schedule": "drop *: 0:0.4", "sites": "decoder.cross"},
    ),
}


def others() -> dict[str, Case]:
    """Methods that are registered and have no case here, such as a new one, with the options of their first presets."""
    named = {name for case in CASES.values() for name in case.method.split("+")}
    return {name: Case(name, None, options) for name, options in besides(named).items()}


class Translation:
    """The translator's training as AttendOut's problem."""

    def loss(self, model: nn.Module, inputs: Any) -> Outcome:
        logits, target = model(inputs["source"], inputs["target"]), inputs["target"]
        losses = F.cross_entropy(logits.mT, target, ignore_index=PAD, reduction="none").sum(-1)
        return Outcome(losses.mean() if model.training else losses)

    def tokens(self, inputs: Any) -> dict[str, Tokens]:
        stacks = {"encoder": inputs["source"], "decoder": inputs["target"]}
        return {stack: Tokens(ids, ids.ne(PAD)) for stack, ids in stacks.items()}

    def validation(self, n: int) -> list[dict[str, Tensor]]:
        rows = torch.randint(len(BATCH[0]), (n,)).tolist()
        return [{"source": BATCH[0][row : row + 1], "target": BATCH[1][row : row + 1]} for row in rows]


def translator(dropout: float = 0.2) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(5)
    return sharpened(TinyTranslator(dropout)).train()


def attached(method: str, model: nn.Module, options: dict[str, Any]) -> Regularizer:
    """A regularizer, attached to `model`; AttendOut knows its training."""
    regularizer = build(method, **options)
    if method == "attend_out":
        regularizer.problem, regularizer.optimizer = Translation(), torch.optim.SGD(model.parameters(), 0.1, 0.9)
    regularizer.begin_epoch(1)
    regularizer.attach(model)
    return regularizer


def backward(model: nn.Module, regularizer: Regularizer | None, batch: Any = BATCH) -> Tensor:
    """The loss of a batch, after its backward."""

    def compute(given: Any) -> Tensor:
        return loss_of(model(*given), given[1])

    loss = compute(batch) if regularizer is None else regularizer.loss(compute, batch)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, regularizer: Regularizer | None = None, updates: range = range(3)) -> list[Tensor]:
    """Losses and weights of some updates, and the random state."""
    optimizer = getattr(regularizer, "optimizer", None) or torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for update in updates:
        torch.manual_seed(7 + update)
        losses.append(backward(model, regularizer))
        optimizer.step()
        optimizer.zero_grad()
        if regularizer is not None:
            regularizer.end_update()
    return [*losses, *(weight.detach().clone() for weight in model.parameters()), torch.get_rng_state()]


def step(model: nn.Module, regularizer: Regularizer | None = None, seed: int = 1, batch: Any = BATCH) -> list[Any]:
    """Loss, gradients and random state after one backward."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = backward(model, regularizer, batch)
    gradients = [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
    return [loss, *gradients, torch.get_rng_state()]


def equal(first: list[Any], second: list[Any]) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    return not differing(list(first), list(second))


def footprint(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that attaching could change."""

    def described(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: described(held) for key, held in value.items()}
        if isinstance(value, nn.Parameter):
            return value.tolist(), value.requires_grad, value.grad is None
        return id(value) if isinstance(value, nn.Module) else value

    return {
        path: (type(module), {name: described(held) for name, held in vars(module).items() if name != "site"})
        for path, module in model.named_modules()
    }
