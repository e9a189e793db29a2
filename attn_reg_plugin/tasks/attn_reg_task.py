"""The fairseq face: a mixin that makes any fairseq task a regularized one.

    @register_task("my_regularized_task", dataclass=with_attn_reg(MyConfig))
    class MyRegularizedTask(AttnRegTask, MyTask):
        '''My task, with the attention regularizers' flags.'''

It attaches when the model is built for training, announces epochs and updates, supplies the targets, logs what the
method does and keeps its state. The loop, the criterion and the optimizer stay fairseq's.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterator
from typing import Any

import torch
from fairseq import metrics
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.optim import AMPOptimizer
from omegaconf import II

from attn_reg_plugin.backends.fairseq import padding_index
from attn_reg_plugin.regularizers import REGISTRY, AttendOut, Regularizer, build, options_of
from attn_reg_plugin.regularizers.options import OptionError
from attn_reg_plugin.tasks.attend_out_training import continue_game, prepare_game
from attn_reg_plugin.tasks.objectives import FairseqObjective, reads_predictions
from attn_reg_plugin.tasks.parts import attach_to_parts
from attn_reg_plugin.tasks.refusals import (
    refuse_alignment,
    refuse_broadcast,
    refuse_model,
    refuse_precision,
    refuse_state,
    refuse_uncalled,
)
from attn_reg_plugin.tasks.sidecar import Sidecar

#: what the mixin adds to a training step's logging output starts with this
PREFIX = "attn_reg/"
#: what a task needs to see of the rest of fairseq's configuration; these fields are no flags (text:
#: fairseq's parser takes an interpolated bool for True)
SEEN = (
    ("save_dir", "checkpoint.save_dir"),
    ("restore_file", "checkpoint.restore_file"),
    ("clip_norm", "optimization.clip_norm"),
    ("cpu", "common.cpu"),
    ("tpu", "common.tpu"),
    ("fp16", "common.fp16"),
    ("memory_efficient_fp16", "common.memory_efficient_fp16"),
    ("fp16_no_flatten_grads", "common.fp16_no_flatten_grads"),
    ("load_checkpoint_on_all_dp_ranks", "checkpoint.load_checkpoint_on_all_dp_ranks"),
)


def _flag(method: str, option: dataclasses.Field, hints: dict[str, Any]) -> tuple[str, Any, dataclasses.Field]:
    """One option as a field of a fairseq config: `p` of `ad_drop` is `ad_drop_p`, the flag `--ad-drop-p`.

    A switch that is on by default becomes `true|false` text: fairseq would turn it into a flag that means its
    opposite.
    """
    kind, default, text = hints[option.name], option.default, option.metadata["help"]
    choices = option.metadata["choices"]
    if kind is bool and default:
        kind, default, choices = str, "true", ("true", "false")
    if choices:
        text += f"; one of {', '.join(choices)}"
    return (
        f"{method}_{option.name}",
        kind,
        dataclasses.field(default=default, metadata={"help": f"{method}: {text}"}),
    )


def _flags() -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """The fields of every registered method, the shared ones once."""
    methods = ", ".join(["none", *sorted(REGISTRY)])
    yield (
        "attn_reg",
        str,
        dataclasses.field(default="none", metadata={"help": f"attention regularizer; one of {methods}"}),
    )
    shared = {option.name: option for option in options_of(Regularizer)}
    for option in shared.values():
        yield f"attn_{option.name}", str, dataclasses.field(default=option.default, metadata=option.metadata)
    for name, source in SEEN:
        yield f"attn_{name}", str, dataclasses.field(default=II(source))
    for name, method in REGISTRY.items():
        hints = typing.get_type_hints(method)
        for option in options_of(method):
            if option.name not in shared:
                yield _flag(name, option, hints)


def with_attn_reg(config: type[FairseqDataclass]) -> type[FairseqDataclass]:
    """A task's config with the regularizers' flags added; give it to `register_task`.

    Args:
        config: the config dataclass of a fairseq task.
    """
    return dataclasses.make_dataclass(f"AttnReg{config.__name__}", list(_flags()), bases=(config,))


def regularizer_from(config: Any) -> Regularizer | None:
    """The regularizer that a fairseq config or namespace asks for; None for `none`.

    Raises:
        ValueError: an unknown method, or an option out of its range.
    """
    name = getattr(config, "attn_reg", "none")
    if name == "none":
        return None
    if name not in REGISTRY:
        raise ValueError(f"--attn-reg is {name!r}, but must be one of {', '.join(['none', *sorted(REGISTRY)])}")
    method = REGISTRY[name]
    hints, values = typing.get_type_hints(method), {}
    for option in options_of(method):
        shared = option.name in {entry.name for entry in options_of(Regularizer)}
        value = getattr(config, f"attn_{option.name}" if shared else f"{name}_{option.name}", option.default)
        if hints[option.name] is bool and isinstance(value, str):
            if value.lower() not in ("true", "false"):
                raise ValueError(f"--{name}_{option.name} is {value!r}, but must be true or false".replace("_", "-"))
            value = value.lower() == "true"
        elif hints[option.name] is str and value in (False, "False"):
            value = "off"  # YAML reads a bare `off` as False
        values[option.name] = value
    try:
        return build(name, **values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--attn-reg {name}: {error}") from None


def print_flags(task: str, config: type[FairseqDataclass]) -> None:
    """Print the flags of a task: fairseq's own --help leaves out those of every task."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    gen_parser_from_dataclass(parser.add_argument_group(f"--task {task}"), config(), delete_default=False)
    print(parser.format_help())


def print_flags_if_asked(task: str, config: type[FairseqDataclass]) -> None:
    """Print them if the command line asks for help on this task."""
    if {"-h", "--help"} & set(sys.argv[1:]) and task in " ".join(sys.argv):
        print_flags(task, config)


class AttnRegTask:
    """Mixin: put it before a fairseq task. With `--attn-reg none` the task is the stock one, bit for bit.

    Attributes:
        regularizer: the method in use, or None.
    """

    regularizer: Regularizer | None

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        refuse_precision(cfg, [name for name, _ in SEEN])
        refuse_broadcast(cfg)
        self.regularizer = regularizer_from(cfg)
        self._objective = getattr(self.regularizer, "objective", None)
        self._handles: list[Any] = []
        self._seen_forward = False
        self.sidecar = Sidecar(getattr(cfg, "attn_save_dir", None))
        self._restore_file = self.sidecar.restored(getattr(cfg, "attn_restore_file", None) or "checkpoint_last.pt")
        if isinstance(self.regularizer, AttendOut) and not self.regularizer.clip_norm:
            self.regularizer.clip_norm = float(getattr(cfg, "attn_clip_norm", 0.0))

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """The task's own flags, and the regularizers' for tasks that have no config dataclass."""
        super().add_args(parser)
        if not hasattr(getattr(cls, "__dataclass", None), "attn_reg"):
            gen_parser_from_dataclass(parser, with_attn_reg(FairseqDataclass)())

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> torch.nn.Module:
        """The task's model, with the regularizer attached if it is built to be trained.

        Raises:
            ValueError: `--attn-sites` matches nothing in the model, or an option of the method does not fit it.
        """
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
            flag = f"--{regularizer.name}-{error.option}".replace("_", "-")
            raise ValueError(f"{flag}: {error}") from None
        except ValueError as error:
            raise ValueError(f"--attn-sites {regularizer.sites!r}: {error}") from None
        if reads_predictions(regularizer):
            who = f"{type(model).__name__} of {type(self).__name__}"
            labels, padding = getattr(regularizer, "labels", "pseudo"), padding_index(model)
            regularizer.objective = FairseqObjective(self._objective, labels, padding, who)

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """fairseq's iterator; a training resumed in a later epoch gets the batches that an undisturbed one has.

        fairseq draws the order of equally long sentences with `seed + epoch` when it first makes batches, and keeps
        these for all epochs; a resumed training would make others.
        """
        kept = self.can_reuse_epoch_itr(dataset) and not (
            kwargs.get("disable_iterator_cache", False) or kwargs.get("update_epoch_batch_itr", False)
        )
        epoch = kwargs.get("epoch", 1)
        if self.regularizer is None or not kept or epoch <= 1 or dataset in self.dataset_to_epoch_iter:
            return super().get_batch_iterator(dataset, *args, **kwargs)
        iterator = super().get_batch_iterator(dataset, *args, **{**kwargs, "epoch": 1})
        iterator.epoch = epoch
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
        if regularizer is None:
            return super().train_step(sample, model, criterion, optimizer, update_num, *args, **kwargs)
        self._game(criterion, optimizer, update_num)
        regularizer.begin_update(update_num)
        step = {"update_num": update_num, "ignore_grad": kwargs.get("ignore_grad", bool(args and args[0]))}
        regularizer.supply(targets=sample.get("target"), sample=sample, **step)
        try:
            with regularizer.statistics.seconds("step_seconds", next(model.parameters()).device):
                loss, sample_size, log = super().train_step(
                    sample, model, criterion, optimizer, update_num, *args, **kwargs
                )
        finally:
            regularizer.supply()
            for site in regularizer.attached_sites:  # the task may translate before the next forward
                site.clear()
        statistics = self._statistics()
        self._seen_forward = self._seen_forward or statistics[PREFIX + "forwards"] > 0
        if not self._seen_forward:
            refuse_uncalled(regularizer, type(self).__name__)
        return loss, sample_size, {**log, **statistics}

    def _game(self, criterion: Any, optimizer: Any, update_num: int) -> None:
        """Tell AttendOut what to play with, and give back the state of an interrupted run, once.

        Before an update's first batch, when no gradient is there yet, it forgets what the last one left behind if
        fairseq skipped its step.
        """
        regularizer = self.regularizer
        if not isinstance(regularizer, AttendOut):
            return
        if regularizer.problem is not None:
            if all(parameter.grad is None for parameter in regularizer.model.parameters()):
                regularizer.forget_unfinished()
            return
        prepare_game(regularizer, self, criterion, optimizer)
        continue_game(regularizer, self.sidecar, update_num)

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
        sums = self.regularizer.statistics.take("rounds", *self.regularizer.by_round)
        if sums:
            for key in self.regularizer.by_round:
                metrics.log_scalar(key, float(sums[key]) / sums["rounds"], sums["rounds"], round=4)

    def _statistics(self) -> dict[str, Any]:
        """Sums of this step, the same keys every time: fairseq adds them up over batches and ranks."""
        sums = self.regularizer.statistics.take()
        return {PREFIX + key: sums.get(key, 0.0) for key in self.regularizer.counted}

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """The task's metrics; and drop rates, the share of regularized updates, and what the method counts."""
        super().reduce_metrics(logging_outputs, criterion)
        keys = [key for log in logging_outputs[:1] for key in log if key.startswith(PREFIX)]
        sums = {key.removeprefix(PREFIX): sum(float(log.get(key, 0)) for log in logging_outputs) for key in keys}
        if not sums or not sums["forwards"]:
            return
        metrics.log_scalar("regularized", sums["regularized"] / sums["forwards"], sums["forwards"], round=3)
        for key in self.regularizer.logged:
            if key == "probe_seconds":
                share = sums[key] / max(sums["step_seconds"], 1e-9)
                metrics.log_scalar("probe_share", share, sums["step_seconds"], round=3)
            elif key == "fallbacks":
                metrics.log_scalar_sum("probe_fallbacks", sums[key])
        for key, valid in sums.items():
            if key.startswith("valid/") and valid > 0:
                site = key.removeprefix("valid/")
                metrics.log_scalar(f"drop_{site}", sums[f"dropped/{site}"] / valid, valid, round=4)

    def state_dict(self) -> dict[str, Any]:
        """The task's state, and the method's under `attn_reg`; a large one is kept beside the checkpoint."""
        state = dict(super().state_dict())
        if self.regularizer is not None and self.regularizer.large_state:
            if getattr(self.regularizer, "problem", True) is not None:  # else nothing happened since the last save
                self.sidecar.save(self.regularizer.updates, self.regularizer.state_dict())
        elif self.regularizer is not None:
            state["attn_reg"] = self.regularizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both; a state without the method's, or another method's task, leaves it as it is."""
        state_dict = dict(state_dict)
        own = state_dict.pop("attn_reg", None)
        super().load_state_dict(state_dict)
        other = isinstance(own, dict) and own.get("method") not in (None, getattr(self.regularizer, "name", None))
        if own is not None and self.regularizer is not None and not other:
            with refuse_state(self._restore_file, self.regularizer):
                self.regularizer.load_state_dict(own)
