"""The training that `attn-reg bench agreement` looks at: fairseq's own, in this process, epoch by epoch."""

from __future__ import annotations

import logging
import random
import statistics
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from attn_reg_plugin.bench.agreement import Agreement, forward_of
from attn_reg_plugin.regularizers.ad_drop.objectives import Objective, OfOutputs, negative_loss
from attn_reg_plugin.regularizers.base.forward import Forward
from attn_reg_plugin.regularizers.base.context import Supplied

#: what the objectives are, and which labels they take
_OBJECTIVES: dict[str, tuple[Objective, str]] = {
    "loss": (negative_loss, "gold"),
    "prediction": (OfOutputs(), "pseudo"),
}


def epochs_of(command: Sequence[str], p: float, sites: str, probed: int, batch: int) -> Iterator[dict[str, Any]]:
    """Train with plain updates, keep the candidates of every epoch, and compare at the end of each.

    Args:
        command: `python -m fairseq_cli.train ...` with `--user-dir` and a task that has the regularizers' flags.
        p: ratio of candidates.
        sites: see `SiteSelector`.
        probed: training examples to compare, drawn at random; all if there aren't more.
        batch: how many of them are probed at once.

    Yields:
        after each epoch what `Agreement.measure` gives, with `epoch`, `updates`, the mean training `loss` (nats, a
        token or an example) and `lr`, the mean learning rate.

    Raises:
        ValueError: flags or data that do not fit.
    """
    from fairseq.trainer import Trainer

    own = ["--attn-reg", "ad_drop", "--ad-drop-probe", "kept", "--ad-drop-on-miss", "plain", "--attn-sites", sites]
    own += ["--ad-drop-p", str(p), "--ad-drop-cross-tuning", "epoch", "--no-save", "--disable-validation"]
    cfg, task = _task([*command, *own])
    task.load_dataset("train", combine=False, epoch=1)
    torch.manual_seed(cfg.common.seed)
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    trainer = Trainer(cfg, task, model, criterion)
    iterator = trainer.get_train_iterator(epoch=1)
    agreement = Agreement(task.regularizer, _objectives(model, task), _forwards(trainer, task, model, probed, batch))
    while iterator.next_epoch_idx <= cfg.optimization.max_epoch:
        trained = _train(trainer, task, model, criterion, iterator)
        model.train()
        yield {"epoch": iterator.epoch, "updates": trainer.get_num_updates(), **trained, **agreement.measure()}
        trainer.lr_step(iterator.epoch)
        iterator = trainer.get_train_iterator(iterator.next_epoch_idx)
    task.regularizer.unbind()


def _task(command: Sequence[str]) -> tuple[Any, Any]:
    """fairseq's configuration and task of a command."""
    from fairseq import tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    from attn_reg_plugin.tasks.dry_run import parse_command

    cfg = convert_namespace_to_omegaconf(parse_command(command, "training"))
    return cfg, tasks.setup_task(cfg.task)


def _objectives(model: Any, task: Any) -> dict[str, Objective]:
    from attn_reg_plugin.backends.fairseq import padding_index
    from attn_reg_plugin.tasks.outputs import FairseqObjective

    who, padding = f"{type(model).__name__} of {type(task).__name__}", padding_index(model)
    return {name: FairseqObjective(one, labels, padding, who) for name, (one, labels) in _OBJECTIVES.items()}


def _forwards(trainer: Any, task: Any, model: Any, probed: int, batch: int) -> list[Forward]:
    """The forwards of the examples to probe, in batches of like length."""
    dataset = task.dataset("train")
    chosen = random.Random(1).sample(range(len(dataset)), min(probed, len(dataset)))
    chosen.sort(key=dataset.num_tokens)
    forwards = []
    for start in range(0, len(chosen), batch):
        sample, _ = trainer._prepare_sample(dataset.collater([dataset[i] for i in chosen[start : start + batch]]))
        supplied = Supplied(targets=sample.get("target"), batch=sample, counts=False)
        forwards.append(forward_of(model, task.regularizer.attached_sites, sample["net_input"], supplied))
    return forwards


def _train(trainer: Any, task: Any, model: Any, criterion: Any, iterator: Any) -> dict[str, float]:
    """One epoch of plain updates, whose backwards are recorded."""
    from fairseq.data.iterators import GroupedIterator

    batches = iterator.next_epoch_itr(shuffle=True)
    trainer.begin_epoch(iterator.epoch)
    task.regularizer.begin_epoch(2 * iterator.epoch - 1)  # cross-tuning has odd epochs plain
    sums, rates = [0.0, 0.0], []
    with _summing(criterion, sums):
        for samples in GroupedIterator(batches, trainer.cfg.optimization.update_freq[-1]):
            rates.append(trainer.get_lr())
            trainer.train_step(samples)
    return {"loss": sums[0] / max(1.0, sums[1]), "lr": statistics.fmean(rates)}


@contextmanager
def _summing(criterion: Any, sums: list[float]) -> Iterator[None]:
    """While open, the losses of the criterion and what they are divided by are added up."""

    def add(module: Any, arguments: Any, given: Any) -> None:
        sums[0] += float(given[0].detach())
        sums[1] += float(given[1])

    handle = criterion.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def quiet() -> Iterator[None]:
    """While open, fairseq and what it uses say nothing but errors."""
    logger = logging.getLogger("fairseq")
    before = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(before)
