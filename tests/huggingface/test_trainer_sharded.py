"""Trainer with FSDP2 in two processes: as data parallel training, and on from a sharded checkpoint."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState

from attn_reg_plugin.huggingface import AttnRegCallback
from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers.r_drop import RDrop
from tests.backends.huggingface_models import build
from tests.huggingface.trainers import ad_drop, trainer_of, weights
from tests.processes import check, run_in_processes

UPDATES, SAVED = 4, 2
LAYER = "BertLayer"


@contextmanager
def sharding_on_cpu() -> Iterator[None]:
    """Accelerate leaves FSDP out where the processes have no accelerator; everything else is its own."""
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.object(AcceleratorState, "__init__", init):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def trained(
    folder: Path, resumed: Path | None = None, method: Regularizer | None = None, **options: Any
) -> dict[str, Any]:
    """A training by Trainer; `regularized` and the drop rates of its log, and the weights."""
    often = {"max_steps": UPDATES, "logging_steps": 1, "save_strategy": "steps", "save_steps": SAVED}
    trainer = trainer_of(folder, "bert", method or ad_drop(cross_tuning="update:2"), **often, **options)
    trainer.train(resume_from_checkpoint=resumed and str(resumed))
    log = [
        {key: line[key] for key in ("attn_reg/regularized", "attn_reg/drop_rate") if key in line}
        for line in trainer.state.log_history[:-1]
    ]
    return {"weights": weights(trainer.model), "log": log, "class": type(trainer.model).__name__}


def both(folder: Path) -> None:
    """Train as a process of two, in every way."""
    found: dict[str, Any] = {"data parallel": trained(folder / "plain")}
    found["R-Drop"] = [trained(folder / "r_drop", method=RDrop(weight=3.0))["weights"]]
    for kind in ("FULL", "SHARDED"):
        fsdp = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": [LAYER]}}
        fsdp["fsdp_config"]["state_dict_type"] = f"{kind}_STATE_DICT"
        with sharding_on_cpu():
            found[kind] = trained(folder / kind, **fsdp)
            if kind == "SHARDED":
                found["resumed"] = trained(folder / kind, folder / kind / f"checkpoint-{SAVED}", **fsdp)
                found["R-Drop"].append(trained(folder / "two_passes", method=RDrop(weight=3.0), **fsdp)["weights"])
    torch.save(found, folder / f"{torch.distributed.get_rank()}.pt")


@pytest.mark.slow
def test_trainer_with_sharded_parameters(tmp_path: Path) -> None:
    check(tmp_path, run_in_processes(tmp_path, both, tmp_path, processes=2))
    # a key's bias moves no attention: its gradient is rounding, of which Adam makes steps
    names = [(name, one.numel()) for name, one in build("bert").named_parameters()]
    moved = torch.cat([torch.full((size,), not name.endswith("key.bias")) for name, size in names])
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        expected = found["data parallel"]
        for kind in ("FULL", "SHARDED"):
            assert found[kind]["class"] == "FSDPBertForSequenceClassification" != expected["class"]
            torch.testing.assert_close(found[kind]["weights"][moved], expected["weights"][moved], rtol=1e-5, atol=1e-5)
            assert found[kind]["log"] == expected["log"] and expected["log"][-1]["attn_reg/regularized"] == 1
        whole, sharded = (one[moved] for one in found["R-Drop"])
        torch.testing.assert_close(sharded, whole, rtol=1e-5, atol=1e-5)
        assert not whole.equal(expected["weights"][moved])
        assert found["resumed"]["weights"].equal(found["SHARDED"]["weights"])
        assert found["resumed"]["log"][-1] == found["SHARDED"]["log"][-1]
    stock = type(build("bert")).from_pretrained(tmp_path / "FULL" / f"checkpoint-{UPDATES}")
    assert weights(stock).equal(found["FULL"]["weights"])


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        ({"fsdp_plugin": mock.Mock(fsdp_version=1)}, "FSDP1 .* cannot be combined with AttnRegCallback; use FSDP2"),
        ({"deepspeed_plugin": mock.Mock(zero_stage=3)}, "DeepSpeed ZeRO 3 cannot be combined .* or ZeRO stage 1 or 2"),
        ({"fsdp_plugin": mock.Mock(fsdp_version=2)}, ""),
        ({"deepspeed_plugin": mock.Mock(zero_stage=2)}, ""),
        ({"device_map": {"bert": 0, "classifier": 1}}, "device_map has the model on 2 GPUs of one process"),
        ({"device_map": {"bert": 0, "classifier": "cpu"}}, ""),
        ({"n_gpu": 2}, "one process with 2 GPUs copies the model .* torchrun --nproc_per_node 2"),
    ],
)
def test_what_is_refused_as_training_begins(tmp_path: Path, plugins: dict[str, Any], said: str) -> None:
    trainer = trainer_of(tmp_path, "bert", max_steps=1)
    trainer.model.hf_device_map, trainer.args._n_gpu = plugins.get("device_map"), plugins.get("n_gpu", 1)
    trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled = ("fsdp_plugin" in plugins, "deepspeed_plugin" in plugins)
    trainer.accelerator = mock.Mock(state=mock.Mock(**plugins))
    callback = AttnRegCallback(ad_drop())
    answer = pytest.raises(ValueError, match=said) if said else nullcontext()
    with mock.patch("attn_reg_plugin.huggingface.callback.calling_trainer", return_value=(trainer, None)), answer:
        callback.on_init_end(trainer.args, trainer.state, trainer.control)


@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_that_an_overflow_skipped_is_no_update(skipped: bool) -> None:
    callback = AttnRegCallback(ad_drop())
    callback.trainer = mock.Mock(**{"accelerator.optimizer_step_was_skipped": skipped})
    names = ("forget_unfinished", "end_update", "begin_update")
    callback.regularizer = mock.Mock(spec=names)
    callback.on_step_end(None, mock.Mock(global_step=3), None)
    assert callback.regularizer.mock_calls == [
        getattr(mock.call, names[0 if skipped else 1])(),
        mock.call.begin_update(3),
    ]
