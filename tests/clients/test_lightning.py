"""Lightning's Trainer with `LightningCallback`: it acts, its limits are plain training, and it continues."""

import os
import re
import warnings
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import attn_reg_plugin
from attn_reg_plugin import ADDrop
from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers import build as method
from tests.backends.huggingface_models import build
from tests.huggingface.trainers import ad_drop, collate, examples, print_of, weights
from tests.processes import check, run_in_processes

pl = pytest.importorskip("lightning.pytorch")
LightningCallback = attn_reg_plugin.LightningCallback
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


class Classifier(pl.LightningModule):
    """A transformers model as people wrap it; `training_step` does not go through this module's own forward."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.model = build("bert", dropout).train()
        self.weight = nn.Buffer(torch.ones(3))  # neither a child nor a parameter
        self.seen: list[dict[str, float]] = []  # of each batch, what was logged
        self.line: dict[str, float] = {}

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.model(**batch).loss

    def log_dict(self, line: dict[str, float], **how: Any) -> None:
        super().log_dict(line, **how)
        self.line = line

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append({key.removeprefix("attn_reg/"): value for key, value in self.line.items()})
        self.line = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoParts(Classifier):
    """Calls itself, and has two children with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, **batch: Tensor) -> Tensor:
        batch.pop("labels")
        return self.head(self.model(**batch).logits)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self(**batch), batch["labels"])


def fit(
    folder: Path, regularizer: Regularizer | None, model: Any = None, resume: Path | None = None, **options: Any
) -> Any:
    """A training of 20 updates, or of `max_steps`, 6 updates an epoch; the LightningModule."""
    pl.seed_everything(3, verbose=False)
    model = Classifier() if model is None else model
    module = options.pop("module", None)
    callbacks = [] if regularizer is None else [LightningCallback(regularizer, module)]
    base = {"max_steps": 20, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 4, "logger": False}
    batch, data = options.pop("batch", 4), options.pop("data", examples("bert"))
    base |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    callbacks += options.pop("callbacks", [])
    trainer = pl.Trainer(default_root_dir=str(folder), callbacks=callbacks, **{**base, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, DataLoader(data, batch, collate_fn=collate), ckpt_path=resume, weights_only=True)
    return model


class OfABatch(Classifier):
    """Takes the batch alone: Lightning looks at what a step takes."""

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


class OfALoader(Classifier):
    """Takes the batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, *_ = next(dataloader_iter)
        return self.model(**batch).loss


class Decorated(Classifier):
    """Lightning looks at the step within."""

    @wraps(OfABatch.training_step)
    def training_step(self, *args: Any) -> Tensor:
        return OfABatch.training_step(self, *args)


@pytest.mark.parametrize("step", [OfABatch, OfALoader, Decorated])
def test_a_step_gets_what_it_takes(step: Any, tmp_path: Path) -> None:
    assert fit(tmp_path, ad_drop(), step(), max_steps=1, log_every_n_steps=1).seen[-1]["regularized"] == 1


def test_manual_optimization_is_logged_after_batches_without_a_step(tmp_path: Path) -> None:
    (model := Classifier()).automatic_optimization = False

    def training_step(batch: dict[str, Tensor], batch_idx: int) -> None:
        model.manual_backward(model.model(**batch).loss)
        if batch_idx % 4 == 0:
            model.optimizers().step()

    model.training_step = training_step
    assert any(line.get("regularized") for line in fit(tmp_path, ad_drop(), model, max_steps=4).seen)


def test_the_guides_lines() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
    code = next(code for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "LightningCallback" in code)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 2}
    batches = DataLoader(examples("bert"), 4, collate_fn=collate)
    world = {"Trainer": partial(pl.Trainer, **quiet, log_every_n_steps=6), "module": Classifier(), "batches": batches}
    exec(code, world)
    assert [log.get("regularized") for log in world["module"].seen[5::6]] == [None, 1]


def test_without_p_it_is_plain_training(tmp_path: Path) -> None:
    plain = weights(fit(tmp_path, None))
    assert weights(fit(tmp_path, ad_drop(p=0.0))).equal(plain)
    assert not weights(fit(tmp_path, ad_drop())).equal(plain)


def test_epochs_and_updates_are_counted(tmp_path: Path) -> None:
    """6 batches an epoch; with two batches an update 3 updates, the last of each for what is left."""
    regularizer, model = ad_drop(cross_tuning="epoch"), Classifier()
    before = print_of(model.model)
    logs = fit(tmp_path, regularizer, model, log_every_n_steps=1).seen
    assert logs[-1]["drop_rate"] > 0.2 and 0 < logs[-1]["probe_share"] < 1
    assert print_of(model.model) == before and "training_step" not in vars(model)
    assert [log.get("regularized", 0.0) for log in logs] == ([0.0] * 6 + [1.0] * 6) * 1 + [0.0] * 6 + [1.0] * 2
    assert regularizer.updates == 20 and regularizer.epoch == 4
    fit(tmp_path, counted := ad_drop(), max_steps=7, accumulate_grad_batches=2)
    assert counted.updates == 7 and counted.epoch == 3


def test_a_checkpoint_continues_and_loads_in_stock_code(tmp_path: Path) -> None:
    """Nothing is drawn, so that both trainings are the same; killed within the second epoch, whose updates drop."""

    def still() -> ADDrop:
        return ad_drop(q=1.0, cross_tuning="epoch")

    options = {"model": Classifier(0.0), "max_epochs": 3, "max_steps": -1, "enable_checkpointing": True}
    saving = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1)
    whole = fit(tmp_path, still(), **options, callbacks=[saving])
    path = tmp_path / "step=12.ckpt"
    again = fit(tmp_path, continued := still(), **{**options, "model": Classifier(0.0), "resume": path})
    assert weights(again).equal(weights(whole)) and continued.updates == 18
    checkpoint = torch.load(path, weights_only=True)
    assert any(key == "LightningCallback[ad_drop]" for key in checkpoint["callbacks"])
    named = {key: value for key, value in checkpoint["state_dict"].items() if key != "weight"}
    stock = build("bert", 0.0)
    stock.load_state_dict({key.removeprefix("model."): value for key, value in named.items()})


class Alone(TwoParts):
    """Has a forward, which its step does not call."""

    training_step = Classifier.training_step


def evaluating() -> Classifier:
    model = Classifier()
    model.model.eval()
    return model


def compiled() -> Classifier:
    model = Classifier()
    model.model = torch.compile(model.model)
    return model


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (evaluating, "BertForSequenceClassification is in evaluation mode, so ad_drop never acted; .* train"),
        (Alone, "training_step made an update without calling the forward of Alone, so .* module='model'"),
        (compiled, "torch.compile cannot be combined with LightningCallback"),
    ],
)
def test_refusals(made: Any, sentence: str, tmp_path: Path) -> None:
    model = made()
    with pytest.raises(ValueError, match=sentence):
        fit(tmp_path, regularizer := ad_drop(), model, max_steps=2)
    assert not regularizer.attached_sites and "training_step" not in vars(model)


def in_two(folder: Path) -> None:
    """Train as a process of two, with half of each batch."""
    rank, data = int(os.environ["RANK"]), examples("bert")
    data = [example for start in range(4 * rank, len(data), 8) for example in data[start : start + 4]]
    two = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "data": data, "log_every_n_steps": 1}
    trained = fit(folder, ad_drop(q=1.0), Classifier(0.0), max_steps=3, **two)
    with pytest.raises(ValueError, match="strategy='ddp_find_unused_parameters_true'"):
        fit(folder, method("attention_layer_drop", p=1.0), Classifier(0.0), max_steps=1, **two)
    with pytest.raises(ValueError, match="data parallel training runs training_step through the forward of TwoParts"):
        fit(folder, ad_drop(), TwoParts(), max_steps=1, **two)
    if rank == 0:
        torch.save((weights(trained), trained.seen[-1]), folder / "trained.pt")


def test_two_processes_are_one_with_the_joined_batch(tmp_path: Path) -> None:
    check(tmp_path, run_in_processes(tmp_path, in_two, tmp_path, processes=2))
    ours, log = torch.load(tmp_path / "trained.pt", weights_only=True)
    alone = fit(tmp_path, ad_drop(q=1.0), Classifier(0.0), max_steps=3, log_every_n_steps=1, batch=8)
    torch.testing.assert_close(ours, weights(alone), atol=1e-5, rtol=0)
    rate = alone.seen[-1]["drop_rate"]  # of two processes the mean of two rates
    assert log["drop_rate"] == pytest.approx(rate, abs=1e-2)
