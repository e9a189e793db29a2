"""`LightningCallback` without Lightning: its hooks around a loop, as Lightning calls them."""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_reg_plugin import ADDrop, AttendOut, LightningCallback
from attn_reg_plugin.lightning.callback import module_to_attach, refuse
from attn_reg_plugin.regularizers import build


class Module(nn.Module):
    """The part of a LightningModule that the callback uses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.device, self.logged = model, torch.device("cpu"), {}
        self.automatic_optimization = True

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the loss."""
        return self.model(*batch).sum()

    def log_dict(self, values: dict[str, float], **_: Any) -> None:
        """Keep them."""
        self.logged = values


def trainer_of(module: Module, **fields: Any) -> Any:
    """Make the part of a trainer that the callback uses, before the first update."""
    strategy = SimpleNamespace(model=module)
    known = {"global_step": 0, "current_epoch": 0, "scaler": None, "ckpt_path": None}
    known |= {"estimated_stepping_batches": float("inf"), "max_epochs": 2}
    connector = SimpleNamespace(should_update_logs=True)
    return SimpleNamespace(strategy=strategy, _logger_connector=connector, **{**known, **fields})


def step(callback: Any, trainer: Any, module: Module, batch: Any, updates: int = 1) -> None:
    """Pass a batch, after which so many updates were made."""
    callback.on_train_batch_start(trainer, module, batch, 0)
    module.training_step(batch, 0)
    trainer.global_step += updates
    callback.on_train_batch_end(trainer, module, None, batch, 0)


def test_the_hooks_of_a_training(translator: nn.Module, batch: Any) -> None:
    callback = LightningCallback("ad_drop", p=0.5, q=0.5, cross_tuning="off")
    module = Module(translator)
    trainer = trainer_of(module)
    callback.regularizer.supply(special_ids={1})
    callback.setup(trainer, module, "fit")
    callback.on_train_start(trainer, module)
    callback.on_train_epoch_start(trainer, module)
    step(callback, trainer, module, batch, updates=0)  # accumulated
    callback.on_train_batch_start(trainer, module, batch, 0)
    assert callback.regularizer.supplied.special_ids == {1}, "also where it was supplied before"
    assert callback.regularizer.updates == 0 and not module.logged
    step(callback, trainer, module, batch)
    assert callback.regularizer.updates == 1 and module.logged["attn_reg/regularized"] == 1
    assert module.logged["attn_reg/drop_rate"] > 0
    state = callback.state_dict()
    callback.teardown(trainer, module, "fit")
    assert not callback.regularizer.attached_sites and "training_step" not in vars(module)
    again = LightningCallback(ADDrop())
    again.load_state_dict(state)
    again.on_train_start(trainer_of(module, global_step=1), module)
    assert again.regularizer.epoch == 1 and again.regularizer.updates == 1
    beside = LightningCallback("r_drop")
    beside.on_train_start(trainer, module)
    again.on_exception(trainer, module, KeyboardInterrupt())
    beside.on_exception(trainer, module, KeyboardInterrupt())
    assert not again.regularizer.attached_sites and "training_step" not in vars(module)


class Telling(Module):
    """Returns its loss as Lightning allows it, too."""

    told: Any = MappingProxyType({"accuracy": 1})

    def training_step(self, batch: Any, index: int) -> Any:
        """Return the loss and more, or nothing."""
        return None if self.told is None else {"loss": super().training_step(batch, index), **self.told}


def test_a_method_of_two_passes_runs_the_step_on_the_repeated_batch(dropping_translator: nn.Module, batch: Any) -> None:
    losses: list[Any] = []
    for made in (Module, Telling):
        callback, module = LightningCallback("r_drop", weight=2.0), made(dropping_translator)
        callback.on_train_start(trainer_of(module), module)
        torch.manual_seed(3)
        losses.append(module.training_step(batch, 0))
        callback.end()
    with build("r_drop", weight=2.0).attach(dropping_translator) as regularizer:
        torch.manual_seed(3)
        expected = regularizer.loss(lambda both: dropping_translator(*both).sum(), batch)
    assert losses[0] == losses[1].pop("loss") == expected and losses[1] == Telling.told
    callback.on_train_start(trainer_of(module), module)
    module.told = None
    with pytest.raises(ValueError, match=r"^r_drop adds to the loss, but training_step returned NoneType"):
        module.training_step(batch, 0)
    callback.end()


def test_a_state_that_does_not_fit_is_refused(translator: nn.Module) -> None:
    callback, module = LightningCallback(ADDrop()), Module(translator)
    callback.load_state_dict({"method": "head_drop", "epoch": 1, "updates": 2})
    with pytest.raises(ValueError, match=r"last\.ckpt: .* does not fit ad_drop .*fit without ckpt_path"):
        callback.on_train_start(trainer_of(module, ckpt_path="last.ckpt"), module)
    assert not callback.regularizer.attached_sites and "training_step" not in vars(module)


def test_an_overflow_is_no_update(translator: nn.Module, batch: Any) -> None:
    callback, module = LightningCallback(ADDrop()), Module(translator)
    scales = iter([8.0, 4.0, 4.0, 4.0])
    trainer = trainer_of(module, scaler=SimpleNamespace(get_scale=lambda: next(scales)))
    callback.on_train_start(trainer, module)
    callback.on_train_epoch_start(trainer, module)
    ended: list[int] = []
    callback.regularizer.end_update = lambda: ended.append(trainer.global_step)
    step(callback, trainer, module, batch)
    step(callback, trainer, module, batch)
    assert ended == [2]
    callback.end()


def test_manual_optimization_has_an_update_a_batch(translator: nn.Module, batch: Any) -> None:
    """Lightning counts the steps of every optimizer, and does not know how many there will be."""
    module = Module(translator)
    module.automatic_optimization = False
    callback = LightningCallback(ADDrop(cross_tuning="update:2"))
    trainer = trainer_of(module, estimated_stepping_batches=8)
    callback.on_train_start(trainer, module)
    counts, due = [], []
    for steps in (2, 2, 0, 3, 2):
        due.append(callback.regularizer.due())
        step(callback, trainer, module, batch, updates=steps)
        counts.append(callback.regularizer.updates)
    assert counts == [1, 2, 2, 3, 4] and due == [False, False, True, True, True] and trainer.global_step == 9
    state = callback.state_dict()
    callback.end()
    again = LightningCallback(ADDrop(cross_tuning="update:2"))
    again.load_state_dict(state)
    again.on_train_start(trainer, module)
    step(again, trainer, module, batch, updates=2)
    assert again.regularizer.updates == 5
    again.end()
    again.on_train_start(trainer, module)
    trainer.global_step += 1  # of another optimizer
    again.on_train_batch_end(trainer, module, None, batch, 0)
    again.end()
    timed = LightningCallback(build("scheduled_dropout", schedule="drop *: 0:0.5 1:0", sites="*", unit="progress"))
    with pytest.raises(ValueError, match=r"leave the optimization to it; .* or use unit='update' or 'epoch'"):
        timed.on_train_start(trainer, module)
    module.automatic_optimization = True
    timed.on_train_start(trainer, module)
    assert timed.regularizer._total == 8
    timed.end()


def test_what_is_attached_to(translator: nn.Module) -> None:
    module = Module(translator)
    assert module_to_attach(module, None) is translator
    module.head = nn.Linear(2, 2)
    assert module_to_attach(module, None) is module and module_to_attach(module, "model") is translator
    with pytest.raises(ValueError, match="module is 'bert', which Module does not have; its children are: model, head"):
        module_to_attach(module, "bert")


def test_attend_out_is_refused_whatever_it_is_given(translator: nn.Module) -> None:
    """Also with an optimizer; the sentence names where it works."""
    for optimizer in (None, torch.optim.SGD(translator.parameters(), lr=0.1)):
        callback, module = LightningCallback(AttendOut(optimizer=optimizer)), Module(translator)
        with pytest.raises(ValueError, match=r"^attend_out trains a second model .* AttnRegCallback, fairseq-train"):
            callback.on_train_start(trainer_of(module), module)
        assert not callback.regularizer.attached_sites and "training_step" not in vars(module)


def test_strategies_with_parts_of_the_model_are_refused(translator: nn.Module) -> None:
    module = Module(translator)
    strategy = type("MyDeepSpeed", (type("DeepSpeedStrategy", (), {}),), {"model": module})()
    with pytest.raises(ValueError, match="strategy DeepSpeed cannot be combined with LightningCallback"):
        refuse(SimpleNamespace(strategy=strategy), module)
