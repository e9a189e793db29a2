"""The fairseq face: a mixin that makes any fairseq task a regularized one.

It attaches when the model is built for training, announces epochs and updates, supplies the targets, logs what the
method does and keeps its state. The loop, the criterion and the optimizer stay fairseq's.
"""

import inspect
import logging
import re
from collections.abc import Sized
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from fairseq import metrics
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.optim import AMPOptimizer

from attn_reg_plugin.backends.fairseq import padding_index
from attn_reg_plugin.callbacks import PREFIX, attached, refuse_unused_parameters, special_ids_of
from attn_reg_plugin.checkpoints import ANEW
from attn_reg_plugin.regularizers import Regularizer, option_flag
from attn_reg_plugin.regularizers.base.distributed import rank
from attn_reg_plugin.regularizers.base.options import OptionError
from attn_reg_plugin.regularizers.base.statistics import Shown, summary
from attn_reg_plugin.tasks.attend_out_training import FairseqTraining
from attn_reg_plugin.tasks.fairseq_fixes.resuming import PATIENCE, ResumedTask
from attn_reg_plugin.tasks.fairseq_settings import fairseq_setting, total_epochs, total_updates
from attn_reg_plugin.tasks.flags import RATES_BY_SITE, print_flags_if_asked, regularizer_from, with_attn_reg
from attn_reg_plugin.tasks.predictions import FairseqObjective, reads_predictions
from attn_reg_plugin.tasks.refusals import refuse_alignment, refuse_model, refuse_settings
from attn_reg_plugin.tasks.sidecar import FROM_WEIGHTS, Sidecar, resume

__all__ = ["AttnRegTask", "print_flags_if_asked", "with_attn_reg"]
logger = logging.getLogger(__name__)

#: as fairseq's multilingual tasks, its mBART, and OPUS-MT write one
LANGUAGE_CODE = re.compile(r"__[\w-]+__|\[[\w-]+\]|>>[\w-]+<<")
#: in the task's state: the method's, unless it is large
STATE = "attn_reg"
#: and there the number of batches in the first epoch, since those of later epochs may differ
FIRST_EPOCH = "attn_reg_first_epoch"
UNUSED = "add --find-unused-parameters, or --ddp-backend legacy_ddp"
#: counts of a sample that are not tensors
COUNTS = ("ntokens", "nsentences")


class AttnRegTask(ResumedTask):
    """Mixin: put it before a fairseq task. With `--attn-reg none` the task is the stock one, bit for bit.

    Unlike it, a training that is resumed goes on as if nobody had disturbed it.

    Attributes:
        regularizer: the method in use, or None.
    """

    regularizer: Regularizer | None

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._config = cfg  # a task without a config dataclass has no `cfg`
        self.regularizer = regularizer_from(cfg)
        methods = [] if self.regularizer is None else self.regularizer.parts
        self._objectives = {method: getattr(method, "objective", None) for method in methods}
        self.sidecar = Sidecar(fairseq_setting(cfg, "save_dir"))
        restored = fairseq_setting(cfg, "restore_file") or "checkpoint_last.pt"
        beside = self.sidecar.folder is not None and restored == "checkpoint_last.pt"  # fairseq's default
        self._restore_file = self.sidecar.folder / restored if beside else Path(restored)
        self._clip_norm = float(fairseq_setting(cfg, "clip_norm") or 0.0)
        self._acted = False  # some forward was seen
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
        """Set up the task as fairseq's does, but refuse a `setup_task` that makes another class's task."""
        task = super().setup_task(cfg, **kwargs)
        if not isinstance(task, cls) and (getattr(cfg, "attn_reg", None) or "none") != "none":
            raise ValueError(
                f"{type(task).__name__}.setup_task makes a {type(task).__name__} instead of a {cls.__name__}, so "
                f"--attn-reg would have no effect; give {cls.__name__} a setup_task of its own that ends in cls(...)"
            )
        return task

    # -- the model ----------------------------------------------------------------------------------------------------

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> torch.nn.Module:
        """The task's model, with the regularizer attached if it is built to be trained.

        Raises:
            ValueError: `--attn-sites` matches nothing in the model, an option of the method does not fit it, or
                fairseq itself cannot train with the settings.
        """
        if not from_checkpoint:
            refuse_settings(self._config, self.regularizer)
        build = super().build_model  # of an older task it takes one argument; fairseq looks for the name as well
        knows = "from_checkpoint" in inspect.signature(build).parameters
        model = build(cfg, from_checkpoint=from_checkpoint) if knows else build(cfg)
        if not from_checkpoint and self.regularizer is not None:
            self._attach(self.regularizer, model)
        return model

    def _attach(self, regularizer: Regularizer, model: torch.nn.Module) -> None:
        regularizer.detach()
        refuse_model(regularizer, model, type(self).__name__)
        try:
            regularizer.attach(model)
            refuse_alignment(model, regularizer.attached_sites)
        except OptionError as error:
            raise ValueError(f"--{option_flag(error.method or regularizer.name, error.option)}: {error}") from None
        except ValueError as error:
            raise ValueError(f"--attn-sites {regularizer.sites!r}: {error}") from None
        for method, objective in self._objectives.items():
            if reads_predictions(method):
                who = f"{type(model).__name__} of {type(self).__name__}"
                labels = "gold" if getattr(method, "reads_gold", False) else "pseudo"
                method.objective = FairseqObjective(objective, labels, padding_index(model), who)

    # -- a training ---------------------------------------------------------------------------------------------------

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """See `ResumedTask`; the first epoch's tells how long the training is."""
        iterator = super().get_batch_iterator(dataset, *args, **kwargs)
        if self.regularizer is not None and not self._begun:
            self._iterators[id(dataset)] = iterator
        return iterator

    def begin_epoch(self, epoch: int, model: torch.nn.Module) -> None:
        """Announce the epoch; fairseq counts from 1, as cross-tuning does."""
        super().begin_epoch(epoch, model)
        if self.regularizer is not None:
            self.regularizer.begin_epoch(epoch)

    @cached_property
    def special_ids(self) -> frozenset[int] | None:
        """The ids that begin and end a text, and language codes: of the dictionary, or of transformers' tokenizer."""
        try:
            words = self.source_dictionary
            codes = {index for index, symbol in enumerate(words.symbols) if LANGUAGE_CODE.fullmatch(symbol)}
            return frozenset((words.bos(), words.eos(), words.pad(), *codes))
        except (NotImplementedError, AttributeError, LookupError):  # fairseq's own raises where there is none
            return special_ids_of(getattr(self, "tokenizer", None))

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
        self._prepare(model, criterion, optimizer, update_num)
        if regularizer is None:
            return super().train_step(sample, model, criterion, optimizer, update_num, *args, **kwargs)
        regularizer.begin_update(update_num)
        ignored = kwargs.get("ignore_grad", bool(args and args[0]))
        told = {"update": update_num, "counts": not ignored, "special_ids": self.special_ids}
        regularizer.supply(targets=sample.get("target"), batch=sample, **told)
        whole = AddingCriterion(criterion, regularizer) if regularizer.passes > 1 else criterion
        device = next(model.parameters()).device
        try:
            with regularizer.statistics.seconds("step_seconds", device):
                loss, sample_size, log = super().train_step(
                    sample, model, whole, optimizer, update_num, *args, **kwargs
                )
        finally:
            regularizer.supply()
            for site in regularizer.attached_sites:  # the task may translate before the next forward
                site.clear()
        statistics = self._statistics()
        self._acted = self._acted or statistics[PREFIX + "forwards"] > 0
        if not self._acted:
            raise ValueError(
                f"{type(self).__name__} made an update without calling the model's forward (it calls its encoder and "
                f"decoder, or other parts), so --attn-reg {regularizer.name} never acted; use --attn-reg none, or a "
                "task that calls the model"
            )
        statistics = _as_tensors(statistics, device)
        if not self.logging_outputs_can_be_summed(criterion):  # gathered as pickles, which must be small
            statistics = dict(zip(statistics, torch.stack([*statistics.values()]).tolist(), strict=True))
        return loss, sample_size, {**log, **statistics}

    def _prepare(self, model: torch.nn.Module, criterion: Any, optimizer: Any, update_num: int) -> None:
        """Continue from the checkpoint, once; forget what an update left behind whose step fairseq skipped."""
        regularizer = self.regularizer
        if not self._begun:
            state, self._first_epoch = self.continue_from(self._restore_file, update_num, STATE, FIRST_EPOCH)
            folder = self.sidecar.folder
            if folder is not None and self._restore_file.parent.resolve() != folder.resolve():
                self._first_epoch = None  # another training's, whose batches may differ
            if regularizer is not None:
                refuse_unused_parameters(model, regularizer, UNUSED)
                if rank() == 0:
                    logger.info(attached(regularizer))
                self._bind(FairseqTraining(self, criterion, optimizer, regularizer.model, self._clip_norm))
                self._resume_method(state, update_num)
            self._iterators = {}
        elif regularizer is not None and all(parameter.grad is None for parameter in regularizer.model.parameters()):
            regularizer.forget_unfinished()

    def _bind(self, training: FairseqTraining) -> None:
        try:
            self.regularizer.bind(training)
            batches = self._batches_of_first_epoch()
            self.regularizer.begin_training(total_updates(self._config, batches), total_epochs(self._config, batches))
        except ValueError as error:
            raise ValueError(f"--attn-reg {self.regularizer.name}: {error}") from None

    def _resume_method(self, state: Any, update_num: int) -> None:
        """Give the method its state, from the checkpoint or from beside it, unless it is another method's."""
        if self.regularizer.large_state:
            folder = self._restore_file.parent
            beside = self.sidecar.load(update_num, folder)
            if beside is not None:
                resume(self.regularizer, beside, self.sidecar.path(update_num, folder), ANEW)
        elif state is not None:
            theirs = state.get("method") if isinstance(state, dict) else None  # a damaged one is refused by `resume`
            if theirs in (None, self.regularizer.name):
                resume(self.regularizer, state, self._restore_file, FROM_WEIGHTS)

    def _batches_of_first_epoch(self) -> int | None:
        """Count them; a training that is resumed has them from its checkpoint, since epochs may differ."""
        subset = fairseq_setting(self._config, "train_subset") or "train"
        batches = self._iterators.get(id(getattr(self, "datasets", {}).get(subset)))
        if not self._first_epoch and isinstance(batches, Sized):
            self._first_epoch = len(batches)
        return self._first_epoch

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

    # -- the log ------------------------------------------------------------------------------------------------------

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
            _log(summary(self.regularizer.quantities, sums, getattr(self._config, RATES_BY_SITE, False)))

    # -- the checkpoint -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The task's state, and the method's under `attn_reg`; a large one is kept beside the checkpoint."""
        state, regularizer = super().state_dict(), self.regularizer
        if self._first_epoch:
            state[FIRST_EPOCH] = self._first_epoch
        if regularizer is not None and not regularizer.large_state:
            state[STATE] = regularizer.state_dict()
        elif regularizer is not None and self._acted:  # else it may be refused, and what was saved must stay
            self.sidecar.save(regularizer.updates, regularizer.state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the task's own state; a training gets the rest in its first step, translation needs none of it."""
        super().load_state_dict(
            {key: value for key, value in state_dict.items() if key not in (STATE, FIRST_EPOCH, PATIENCE)}
        )


def _as_tensors(sums: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Make sums float64 scalars on `device`, without reading from it.

    fairseq adds up numbers and tensors in a buffer each, and a layer left out on one rank has a number there.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return {key: zero + value for key, value in sums.items()}


def _log(shown: dict[str, Shown]) -> None:
    """Give quantities to fairseq's meters: sums as sums, the others as means with their weights."""
    for title, (value, weight) in shown.items():
        if weight is None:
            metrics.log_scalar_sum(PREFIX + title, value)
        else:
            metrics.log_scalar(PREFIX + title, value, weight, round=4)


class AddingCriterion:
    """Stands in for fairseq's criterion in a training step of a method with several passes.

    The sample size and all that is logged are of one pass, the mean over all of them, as in a plain training.
    """

    def __init__(self, criterion: Any, regularizer: Regularizer) -> None:
        self.criterion, self.regularizer = criterion, regularizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.criterion, name)

    def __call__(
        self, model: torch.nn.Module, sample: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any, dict[str, Any]]:
        """Return loss, sample size and what is logged; alignments, of positions in the whole batch, are refused."""
        regularizer, passes = self.regularizer, self.regularizer.passes
        if sample.get("alignments") is not None:
            raise ValueError(
                f"--attn-reg {regularizer.name} repeats the batch, and alignments cannot be repeated with it; train "
                "without --load-alignments, or use another --attn-reg"
            )
        size: Any = None
        log: dict[str, Any] = {}

        def compute(batch: dict[str, Any]) -> torch.Tensor:
            nonlocal size, log
            counts = {name: batch[name] * passes for name in COUNTS if isinstance(batch.get(name), int)}
            batch = {**batch, **counts}
            told = regularizer.supplied
            regularizer.supply(replace(told, batch=batch, targets=batch.get("target")))
            try:
                loss, size, log = self.criterion(model, batch, *args, **kwargs)
            finally:
                regularizer.supply(told)
            return loss / passes

        loss = regularizer.loss(compute, sample, share=lambda total, count: total)
        return loss, _of_one_pass(size, passes), {name: _of_one_pass(value, passes) for name, value in log.items()}


def _of_one_pass(value: Any, passes: int) -> Any:
    """Divide a sum over all passes by their number; whole numbers stay whole where they can."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor):
        return value
    return value // passes if isinstance(value, int) and value % passes == 0 else value / passes
