"""Models of which two processes have a copy (DDP) or shards (FSDP2): gradients and masks are those of one process."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from attn_reg_plugin.regularizers import build
from attn_reg_plugin.regularizers.base.statistics import summary
from tests.backends import huggingface_models
from tests.processes import check, kill_oneself, run_in_processes
from tests.regularizers import trainings
from tests.regularizers.base.parallel_trainings import AD_DROP, Case, Run, by_one_process, shard

INTEGRATED = {**AD_DROP, "attribution": "integrated", "integrated_steps": 2}
RANDOM = {**AD_DROP, "attribution": "random", "q": 0.5, "cross_tuning": "update:1"}
CASES = {
    **{
        f"{family}{', attached before' if attached else ''}{', checkpointed' if checkpointing else ''}": Case(
            family, checkpointing=checkpointing, attached=attached
        )
        for family in ("bert", "marian", "llama")
        for attached in (False, True)
        for checkpointing in ("", "model")
        if family == "bert" or attached == bool(checkpointing)
    },
    "integrated, layers only": Case("bert", options=INTEGRATED, root=False, attached=True),
    "joint, wrapper": Case("llama", options={**INTEGRATED, "integrated_path": "joint"}, checkpointing="wrapper"),
    "wrapper": Case("bert", checkpointing="wrapper", attached=True),
    "in parts": Case("bert", parts=2),
    "attention": Case("llama", options={**AD_DROP, "attribution": "attention"}),
    "random, dropout": Case("bert", options=RANDOM, drawn=True, dropout=0.1),
    "low": Case("bert", drawn=True, low=True),
    "low, attached before": Case("bert", drawn=True, low=True, attached=True),
    "scheduled_dropout": Case("bert", "scheduled_dropout", {"schedule": "drop *: 0:0.5"}, drawn=True),
    "attention_layer_drop": Case("marian", "attention_layer_drop", {"p": 0.5}, drawn=True),
    "attention_layer_drop, in parts": Case(
        "llama", "attention_layer_drop", {"p": 0.5}, checkpointing="model", drawn=True, attached=True, parts=2
    ),
    "attention_dropout": Case("llama", "attention_dropout", {"p": 0.4}, drawn=True),
    "head_drop": Case("llama", "head_drop", {"p": 0.4}, drawn=True),
    "layer_drop": Case("bert", "layer_drop", {"p": 0.4}, drawn=True),
    "hidden_cut": Case("bert", "hidden_cut", {"cut": 0.4}, drawn=True),
    "r_drop": Case("bert", "r_drop", {}, drawn=True),
}
#: by data parallel training; attend_out's two processes are tested by themselves
CASES |= {
    f"copied, {name}": Case(
        "marian", case.method, case.options, drawn=True, copied=True, attached=True, dropout=0.1, updates=3
    )
    for name, case in {**trainings.CASES, **trainings.others()}.items()
    if case.method != "attend_out"
}

#: trainings that are killed
RESUMED = {
    "ad_drop": Case("bert", options={**AD_DROP, "q": 0.5}, dropout=0.1),
    "scheduled_dropout": Case("bert", "scheduled_dropout", {"schedule": "drop *: 0:0.2 4:0.6"}, dropout=0.1),
}


def all_cases(folder: Path) -> None:
    """Train as a process of two; killed in the end, some updates after a checkpoint."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name, case in CASES.items():
        found[name] = Run(case, rank, sharded=True).found()
    found["refused"] = refused()
    found["whole"] = {}
    for name, case in RESUMED.items():
        run = Run(case, rank, sharded=True)
        run.train(0, 1)
        run.save(folder / name)
        run.train(2, 4)
        found["whole"][name] = run.result()
    torch.save(found, folder / f"{rank}.pt")
    run.train(5, 5)
    kill_oneself()


def resumed(folder: Path) -> None:
    """Go on from the checkpoints as a process of two."""
    dist.init_process_group("gloo")
    found = {}
    for name, case in RESUMED.items():
        run = Run(case, dist.get_rank(), sharded=True)
        run.load(folder / name)
        run.train(2, 4)
        found[name] = run.result()
    torch.save(found, folder / f"resumed_{dist.get_rank()}.pt")


def refused() -> dict[str, str]:
    """Collect the refusals of what cannot act on a sharded model, or not where it is attached."""
    said = {}
    for what in ("attend_out", "later", "inside"):
        model = huggingface_models.build("bert")
        if what != "later":
            shard(Case("bert"), model)
        method = build("ad_drop", **AD_DROP) if what == "inside" else build("attend_out")
        with pytest.raises(ValueError) as error, method.attach(model.bert if what == "inside" else model):
            if what == "later":
                shard(Case("bert"), model)
            model(**huggingface_models.batch("bert"))
        said[what] = str(error.value)
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    codes = run_in_processes(folder, all_cases, folder, processes=2)
    if not all((folder / f"{rank}.pt").exists() for rank in range(2)):
        check(folder, codes)
    assert 0 not in codes, "both are killed"
    return folder


@pytest.fixture(scope="module")
def processes(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_masks_are_those_of_one_process(processes: Any, name: str) -> None:
    case, expected = CASES[name], by_one_process(CASES[name])
    ours, theirs = (process[name] for process in processes)
    for update in range(case.updates):
        gradients = expected["gradients"][update]
        for found in (ours["gradients"][update], theirs["gradients"][update]):
            assert gradients.keys() <= found.keys() and any(gradient.any() for gradient in found.values())
            for key, gradient in found.items():
                wanted = gradients.get(key, torch.zeros_like(gradient))
                torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)
        if case.drawn:
            continue
        assert ours["masks"][update].keys() == expected["masks"][update].keys()
        for key, mask in expected["masks"][update].items():
            halves = [one["masks"][update][key] for one in (ours, theirs)]
            assert torch.cat(halves).equal(mask), key
        assert expected["masks"][update] and not all(mask.all() for mask in expected["masks"][update].values())


@pytest.mark.parametrize("name", CASES)
def test_the_log_has_the_sums_of_both(processes: Any, name: str) -> None:
    regularizer = Run(CASES[name], None, sharded=False).regularizer
    wanted = [quantity for quantity in regularizer.quantities if "seconds" not in quantity.key]
    for (ours, logged), (theirs, others) in zip(*(process[name]["counted"] for process in processes), strict=True):
        mean = {key: (ours.get(key, 0.0) + theirs.get(key, 0.0)) / 2 for key in ours.keys() | theirs.keys()}
        shown = {title: value.value for title, value in summary(wanted, mean).items()}
        assert {key: value for key, value in logged.items() if key in shown} == pytest.approx(shown)
        assert logged == others and shown["regularized"] in (0.0, 1.0)


def test_it_goes_on_from_a_sharded_checkpoint(folder: Path, processes: Any) -> None:
    check(folder, run_in_processes(folder, resumed, folder, processes=2))
    for rank, process in enumerate(processes):
        found = torch.load(folder / f"resumed_{rank}.pt", weights_only=True)
        for name, run in process["whole"].items():
            assert found[name]["updates"] == run["updates"] == 5
            assert all(weight.equal(found[name]["weights"][key]) for key, weight in run["weights"].items())


def test_what_cannot_act_is_refused_by_name(processes: Any) -> None:
    said = processes[0]["refused"]
    assert said["attend_out"].startswith(
        "attend_out cannot act on a model whose parameters are sharded by fully_shard: "
    )
    assert said["later"] == said["attend_out"]
    assert "attach to that module" in said["inside"] and "BertModel inside" in said["inside"]


def test_zero_3_and_fsdp1_are_refused() -> None:
    """By the marks on parameters that DeepSpeed has sharded, and that FSDP1, which needs a GPU, has flattened."""
    import torch.distributed.fsdp  # noqa: F401

    model = huggingface_models.build("bert")
    with build("ad_drop", **AD_DROP).attach(model), pytest.raises(ValueError, match=r"DeepSpeed ZeRO 3.*stage 1 or"):
        next(model.parameters()).ds_tensor = None
        model(**huggingface_models.batch("bert"))
    model = huggingface_models.build("bert")
    next(model.parameters())._fsdp_flattened = True
    with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
        build("ad_drop").attach(model)


def test_layers_with_shards_inside_are_not_left_out(classifier) -> None:
    """A rank that leaves such a layer out would not gather what is in it, and the others would wait."""
    inner = classifier.get_submodule("encoder.layers.1.feed_forward")
    for name in ("layer_drop", "attention_dropout"):
        with build(name, p=0.5).attach(classifier) as regularizer:
            refused = pytest.raises(ValueError, match=r"leaves out the layer encoder.layers.1, in which .* sharded")
            with refused if name == "layer_drop" else nullcontext():
                regularizer.check_shards([inner])
