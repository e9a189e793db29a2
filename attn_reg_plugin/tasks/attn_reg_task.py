"""The fairseq face: a mixin that makes any fairseq task a regularized one.

    @register_task("my_regularized_task", dataclass=with_attn_reg(MyConfig))
    class MyRegularizedTask(AttnRegTask, MyTask):
        '''My task, with the attention regularizers' flags.'''

A task without a config dataclass is registered by its name alone: `@register_task("my_regularized_task")`.

It attaches when the model is built for training, announces epochs and updates, supplies the targets, logs what the
method does and keeps its state, and what fairseq itself forgets of a training that is resumed: its batches, and how
long `--patience` has been waiting. The loop, the criterion and the optimizer stay fairseq's.
"""

from __future__ import annotations

import inspect
from collections.abc import Sized
from typing import Any

import torch
from fairseq import metrics
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.optim import AMPOptimizer

from attn_reg_plugin.backends.fairseq import padding_index
from attn_reg_plugin.checkpoints import refuse_state
from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers.base.distributed import object_from_first_rank, rank
from attn_reg_plugin.regularizers.base.options import OptionError
from attn_reg_plugin.regularizers.base.statistics import Shown, summary
from attn_reg_plugin.tasks.attend_out_training import FairseqTraining
from attn_reg_plugin.tasks.flags import SEEN, flag_of, print_flags_if_asked, regularizer_from, seen, with_attn_reg
from attn_reg_plugin.tasks.length import total_epochs, total_updates
from attn_reg_plugin.tasks.outputs import FairseqObjective, reads_predictions
from attn_reg_plugin.tasks.parts import attach_to_parts
from attn_reg_plugin.tasks.patience import PATIENCE, go_on_waiting, waited
from attn_reg_plugin.tasks.refusals import (
    refuse_alignment,
    refuse_broadcast,
    refuse_model,
    refuse_other_class,
    refuse_precision,
    refuse_sharding,
    refuse_uncalled,
)
from attn_reg_plugin.tasks.repeating import adding
from attn_reg_plugin.tasks.sidecar import FROM_WEIGHTS, Sidecar, continue_from, continue_from_checkpoint, is_of
from attn_reg_plugin.tasks.task_state import task_state

__all__ = ["SEEN", "AttnRegTask", "print_flags_if_asked", "with_attn_reg"]

#: what the mixin adds to a training step's logging output starts with this
PREFIX = "attn_reg/"
#: in the task's state: how many batches the training's first epoch had
FIRST_EPOCH = "attn_reg_first_epoch"


class AttnRegTask:
    """Mixin: put it before a fairseq task. With `--attn-reg none` the task is the stock one, bit for bit.

    Unlike it, a training that is resumed goes on as if nobody had disturbed it.

    Attributes:
        regularizer: the method in use, or None.
    """

    regularizer: Regularizer | None

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._config = cfg  # a task without a config dataclass has no `cfg`
        refuse_precision(cfg)
        self.regularizer = regularizer_from(cfg)
        if self.regularizer is not None:
            refuse_sharding(seen(cfg, "ddp_backend"), self.regularizer)
        self._objectives = {part: getattr(part, "objective", None) for part in _parts(self.regularizer)}
        self._handles: list[Any] = []
        self._seen_forward = False
        self.sidecar = Sidecar(seen(cfg, "save_dir"))
        self._restore_file = self.sidecar.restored(seen(cfg, "restore_file") or "checkpoint_last.pt")
        self._clip_norm = float(seen(cfg, "clip_norm") or 0.0)
        self._begun = False  # the first step was made
        self._first_epoch: int | None = None  # its number of batches
        self._iterators: dict[int, Any] = {}  # by the id of their dataset, until the first step

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """The task's own flags, and the regularizers' for tasks that have no config dataclass."""
        super().add_args(parser)
        if not hasattr(getattr(cls, "__dataclass", None), "attn_reg"):
            gen_parser_from_dataclass(parser, with_attn_reg(FairseqDataclass)())

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> Any:
        """The task as fairseq's makes it.

        Raises:
            ValueError: fairseq's makes one of its own class, which would leave `--attn-reg` out without a word.
        """
        task = super().setup_task(cfg, **kwargs)
        if not isinstance(task, cls) and (getattr(cfg, "attn_reg", None) or "none") != "none":
            refuse_other_class(cls, task)
        return task

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> torch.nn.Module:
        """The task's model, with the regularizer attached if it is built to be trained.

        Raises:
            ValueError: `--attn-sites` matches nothing in the model, or an option of the method does not fit it; or
                fairseq cannot hand the checkpoint to go on from to the other ranks.
        """
        if not from_checkpoint:
            refuse_broadcast(self._config)
        build = super().build_model  # of an older task it takes one argument; fairseq looks for the name as well
        knows = "from_checkpoint" in inspect.signature(build).parameters
        model = build(cfg, from_checkpoint=from_checkpoint) if knows else build(cfg)
        if from_checkpoint:
            return model
        if self.regularizer is not None:
            self.sidecar.repair_last()
            self._attach(self.regularizer, model)
        return model

    def _attach(self, regularizer: Regularizer, model: torch.nn.Module) -> None:
        """Attach to the model, or to its parts if these are what the task calls.

        Raises:
            ValueError: the method cannot work with the model, or `--attn-sites` matches nothing in it.
        """
        for handle in self._handles:
            handle.remove()
        regularizer.detach()
        refuse_model(regularizer, model, type(self).__name__)
        try:
            self._handles = attach_to_parts(regularizer, model)
            refuse_alignment(model, regularizer.attached_sites)
        except OptionError as error:
            raise ValueError(f"{flag_of(error.method or regularizer.name, error.option)}: {error}") from None
        except ValueError as error:
            raise ValueError(f"--attn-sites {regularizer.sites!r}: {error}") from None
        for part in filter(reads_predictions, _parts(regularizer)):
            who = f"{type(model).__name__} of {type(self).__name__}"
            labels = "gold" if getattr(part, "reads_gold", False) else "pseudo"
            part.objective = FairseqObjective(self._objectives[part], labels, padding_index(model), who)

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """fairseq's iterator; a training resumed in a later epoch gets the batches that an undisturbed one has.

        fairseq draws the order of equally long sentences with `seed + epoch` when it first makes batches, and keeps
        these for all epochs; a resumed training would make others. A task that makes new ones in each epoch still does.
        """
        kept = self.can_reuse_epoch_itr(dataset) and not (
            kwargs.get("disable_iterator_cache", False) or kwargs.get("update_epoch_batch_itr", False)
        )
        epoch = kwargs.get("epoch", 1)
        resumed = kept and epoch > 1 and not self._begun and dataset not in self.dataset_to_epoch_iter
        if resumed:  # what the task keeps of this call, the next one returns
            super().get_batch_iterator(dataset, *args, **{**kwargs, "epoch": 1})
        iterator = super().get_batch_iterator(dataset, *args, **kwargs)
        if resumed:
            iterator.epoch = epoch
        if self.regularizer is not None and not self._begun:
            self._iterators[id(dataset)] = iterator
        return iterator

    def begin_epoch(self, epoch: int, model: torch.nn.Module) -> None:
        """Announce the epoch; fairseq counts from 1, as cross-tuning does."""
        super().begin_epoch(epoch, model)
        if self.regularizer is not None:
            self.regularizer.begin_epoch(epoch)

    def train_step(
        self,
        sample: dict[str, Any],
        model: torch.nn.Module,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any, dict[str, Any]]:
        """The task's own step; its forward is regularized, and its logging output says what happened."""
        regularizer = self.regularizer
        self._prepare(criterion, optimizer, update_num)
        if regularizer is None:
            return super().train_step(sample, model, criterion, optimizer, update_num, *args, **kwargs)
        regularizer.begin_update(update_num)
        ignored = kwargs.get("ignore_grad", bool(args and args[0]))
        regularizer.supply(targets=sample.get("target"), batch=sample, update=update_num, counts=not ignored)
        try:
            with regularizer.statistics.seconds("step_seconds", next(model.parameters()).device):
                loss, sample_size, log = super().train_step(
                    sample, model, adding(criterion, regularizer), optimizer, update_num, *args, **kwargs
                )
        finally:
            regularizer.supply()
            for site in regularizer.attached_sites:  # the task may translate before the next forward
                site.clear()
        statistics = self._statistics()
        self._seen_forward = self._seen_forward or statistics[PREFIX + "forwards"] > 0
        if not self._seen_forward:
            refuse_uncalled(regularizer, type(self).__name__)
        if self.logging_outputs_can_be_summed(criterion):
            statistics = _as_tensors(statistics, next(model.parameters()).device)
        return loss, sample_size, {**log, **statistics}

    def _prepare(self, criterion: Any, optimizer: Any, update_num: int) -> None:
        """Continue from the checkpoint, once.

        Before an update's first batch, when no gradient is there yet, the method forgets what the last one left behind
        if fairseq skipped its step.
        """
        regularizer = self.regularizer
        if not self._begun:
            kept = self._kept_in_checkpoint(update_num)
            go_on_waiting(kept.get(PATIENCE))
            if regularizer is not None:
                self._bind(regularizer, kept, criterion, optimizer, update_num)
            self._begun, self._iterators = True, {}
        elif regularizer is not None and all(parameter.grad is None for parameter in regularizer.model.parameters()):
            regularizer.forget_unfinished()

    def _bind(
        self, regularizer: Regularizer, kept: dict[str, Any], criterion: Any, optimizer: Any, update_num: int
    ) -> None:
        """Bind the method to the training and continue from its state."""
        training = FairseqTraining(self, criterion, optimizer, regularizer.model, self._clip_norm)
        self._first_epoch = self._batches_of_first_epoch(kept)
        try:
            regularizer.bind(training)
            length = (total(self._config, self._first_epoch) for total in (total_updates, total_epochs))
            regularizer.begin_training(*length)
        except ValueError as error:
            raise ValueError(f"--attn-reg {regularizer.name}: {error}") from None
        if regularizer.large_state:
            continue_from(self.sidecar, regularizer, update_num)
        else:
            continue_from_checkpoint(self._restore_file, regularizer, kept.get("attn_reg"))

    def _kept_in_checkpoint(self, update_num: int) -> dict[str, Any]:
        """What `state_dict` of this class put into the checkpoint that the training goes on from; rank 0 reads it."""
        if not update_num:
            return {}
        state = task_state(self._restore_file, update_num) if rank() == 0 else {}
        return object_from_first_rank({key: state[key] for key in ("attn_reg", FIRST_EPOCH, PATIENCE) if key in state})

    def _batches_of_first_epoch(self, kept: dict[str, Any]) -> int | None:
        """Their number; None where fairseq's iterator over the training set was made elsewhere, or has no length.

        A resumed training may be in another part of the data, or make other batches: the checkpoint's number is taken.
        """
        if kept.get(FIRST_EPOCH):
            return int(kept[FIRST_EPOCH])
        subset = seen(self._config, "train_subset") or "train"
        batches = self._iterators.get(id(getattr(self, "datasets", {}).get(subset)))
        return len(batches) if isinstance(batches, Sized) else None

    def optimizer_step(self, optimizer: Any, model: torch.nn.Module, update_num: int) -> None:
        """The attacker's, or any method's, step; AttendOut's defender makes its own after it.

        With --amp an overflow lowers the scale and skips the step; fairseq then tries the same batch again.
        """
        scaler = optimizer.scaler if isinstance(optimizer, AMPOptimizer) else None
        scale = scaler.get_scale() if scaler else 0.0
        super().optimizer_step(optimizer, model=model, update_num=update_num)
        if self.regularizer is not None and not (scaler and scaler.get_scale() < scale):
            self.regularizer.end_update()
            self._log_round()

    def _log_round(self) -> None:
        """Log a round that ended with this update, equal on all ranks; the update's logging output was made before."""
        rounds = self.regularizer.by_round
        if not rounds:
            return
        sums = self.regularizer.statistics.take(*(key for quantity in rounds for key in quantity.keys))
        _log(summary(rounds, sums) if sums else {})

    def _statistics(self) -> dict[str, Any]:
        """Sums of this step, the same keys every time: fairseq adds them up over batches and ranks."""
        sums = self.regularizer.statistics.take()
        keys = dict.fromkeys(key for quantity in self.regularizer.quantities for key in quantity.keys)
        return {PREFIX + key: sums.get(key, 0.0) for key in keys}

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """The task's metrics; and drop rates, the share of regularized updates, and what the method counts."""
        super().reduce_metrics(logging_outputs, criterion)
        keys = [key for log in logging_outputs[:1] for key in log if key.startswith(PREFIX)]
        sums = {key.removeprefix(PREFIX): sum(float(log.get(key, 0)) for log in logging_outputs) for key in keys}
        if sums and sums["forwards"]:
            _log(summary(self.regularizer.quantities, sums))

    def state_dict(self) -> dict[str, Any]:
        """The task's state, and the method's under `attn_reg`; a large one is kept beside the checkpoint.

        And, with `--patience`, how long it has been waiting.
        """
        state = dict(super().state_dict())
        if self.regularizer is not None and self.regularizer.large_state:
            if self.regularizer.begun:  # else nothing happened since the last save
                self.sidecar.save(self.regularizer.updates, self.regularizer.state_dict())
        elif self.regularizer is not None:
            state["attn_reg"] = self.regularizer.state_dict()
        if self._first_epoch:
            state[FIRST_EPOCH] = self._first_epoch
        patience = waited()
        return {**state, PATIENCE: patience} if patience else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both; a state without the method's, or another method's task, leaves it as it is."""
        state_dict = dict(state_dict)
        own = state_dict.pop("attn_reg", None)
        for key in (FIRST_EPOCH, PATIENCE):  # of a checkpoint that a training goes on from, its first step takes them
            state_dict.pop(key, None)
        super().load_state_dict(state_dict)
        if self.regularizer is not None and is_of(own, self.regularizer):
            with refuse_state(self._restore_file, f"--attn-reg {self.regularizer.name}", FROM_WEIGHTS):
                self.regularizer.load_state_dict(own)


def _parts(regularizer: Regularizer | None) -> list[Regularizer]:
    return [] if regularizer is None else regularizer.parts


def _as_tensors(sums: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """The sums as float64 scalars on `device`, in which fairseq adds them up over ranks; nothing is read from it.

    It adds up numbers and tensors in a buffer each, so that on all ranks the same ones have to be tensors, also where
    a layer left out on one rank has no sum there.
    """
    return {
        key: value.to(device, torch.float64)
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=torch.float64, device=device)
        for key, value in sums.items()
    }


def _log(shown: dict[str, Shown]) -> None:
    """Give quantities to fairseq's meters: sums as sums, the others as means with their weights."""
    for title, (value, weight) in shown.items():
        if weight is None:
            metrics.log_scalar_sum(title, value)
        else:
            metrics.log_scalar(title, value, weight, round=4)
