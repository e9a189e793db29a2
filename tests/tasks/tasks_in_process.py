"""Tiny tasks of fairseq's, made regularized ones, in this process and without a corpus or a trainer."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.tasks import FairseqTask, LegacyFairseqTask
from torch import Tensor, nn

from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask
from tests.backends.fairseq_models import WORDS, arguments, words

#: a probability of 0.4 that falls from the middle of the training to its end
PROGRESS = {"attn_reg": "head_drop", "head_drop_unit": "progress", "head_drop_p": 0.4}
PROGRESS |= {"head_drop_turn": 0.5, "head_drop_end": 1.0}
ALWAYS = {"attn_reg": "ad_drop", "ad_drop_cross_tuning": "off", "ad_drop_p": 0.5, "ad_drop_q": 0.9}


def sample(seed: int = 2, rows: int = 3) -> dict[str, Any]:
    """A batch of sentence pairs, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(4, WORDS, (rows, 7), generator=generator)
    target = torch.randint(4, WORDS, (rows, 6), generator=generator)
    source[0, 5:] = target[1, 4:] = 1
    previous = torch.cat([torch.full((rows, 1), 2), target[:, :-1]], 1).masked_fill(target.eq(1), 1)
    net_input = {"src_tokens": source, "src_lengths": source.ne(1).sum(1), "prev_output_tokens": previous}
    ntokens = int(target.ne(1).sum())
    return {"net_input": net_input, "target": target, "ntokens": ntokens, "nsentences": rows}


class Optimizer:
    """A stand-in for what a task's step needs: gradients are kept, no step is made."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Given:
    """Attributes that both kinds of task have here."""

    source_dictionary = target_dictionary = property(lambda self: words())

    def build_model(self, cfg: Namespace, from_checkpoint: bool = False) -> nn.Module:
        return cfg.model


class GivenModel(Given, FairseqTask):
    """A task whose model is the configuration's."""


class Older(Given, LegacyFairseqTask):
    """fairseq's own kind of task without a config dataclass: its `cfg` is None, all flags are in `args`."""


class Regularized(AttnRegTask, GivenModel):
    """A task that calls its model once a step."""


class Experts(GivenModel):
    """Calls encoder and decoder, as fairseq's translation_moe does."""

    def train_step(self, sample: Any, model: Any, criterion: Any, optimizer: Any, *args: Any) -> Any:
        net_input = sample["net_input"]
        encoded = model.encoder(net_input["src_tokens"], src_lengths=net_input["src_lengths"])
        output = model.decoder(prev_output_tokens=net_input["prev_output_tokens"], encoder_out=encoded)
        loss, _ = criterion.compute_loss(model, output, sample)
        optimizer.backward(loss)
        return loss, 1, {}


class RegularizedExperts(AttnRegTask, Experts):
    """Nothing of its model that can be heard is called."""


class RegularizedOlder(AttnRegTask, Older):
    """Regularized."""


def options(**flags: Any) -> Namespace:
    return arguments(**{**ALWAYS, **flags})


def attached(model: nn.Module, kind: type[AttnRegTask] = Regularized, **flags: Any) -> AttnRegTask:
    """A task whose regularizer is attached to `model`."""
    cfg = options(model=model, **flags)
    task = kind(cfg)
    task.build_model(cfg)
    return task


def step(task: Any, model: nn.Module, batch: dict[str, Any], loss: Any = None) -> tuple[float, dict[str, Any]]:
    """A training step in training mode: its loss and logging output; gradients stay on the model."""
    torch.manual_seed(11)
    model.zero_grad()
    value, _, log = task.train_step(batch, model.train(), loss or criterion(), Optimizer(), 0)
    return float(value.detach() if isinstance(value, Tensor) else value), log


def criterion() -> LabelSmoothedCrossEntropyCriterion:
    """Label smoothing, whose sample size is the number of tokens."""
    return LabelSmoothedCrossEntropyCriterion(SimpleNamespace(target_dictionary=words()), False, 0.1)
