"""A loop of one's own that keeps regions: stopped anywhere and continued, it ends in the same bits; by two as well."""

from __future__ import annotations

import contextlib
import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from attn_reg_plugin import ADDrop
from attn_reg_plugin.checkpoints import load_state, save_state
from attn_reg_plugin.regularizers import Tokens
from tests.attention.tiny_model import PAD, TinyTranslator, loss_of, sharpened, tokens
from tests.huggingface.processes import check, run_in_processes
from tests.regularizers.test_kept_recording import found, kept, run

EPOCHS, ROWS, PER_BATCH = 4, 12, 3
LENGTHS = [[6, 4, 2, 5, 3, 6, 1, 4, 7, 2, 5, 3], [3, 5, 1, 6, 2, 4, 3, 3, 5, 6, 2, 1]]
SOURCE, TARGET = (tokens(lengths, 7, seed=seed) for seed, lengths in enumerate(LENGTHS))
UPDATES = EPOCHS * ROWS // PER_BATCH
FILES = {"store_gb": 1e-9}
#: of an example: two encoder and four decoder maps of two heads
WAYS = {
    "epochs, in memory": {"cross_tuning": "epoch"},
    "epochs, in files": {"cross_tuning": "epoch", **FILES},
    "epochs, in both": {"cross_tuning": "epoch", "store_gb": 300 / 2**30},
    "always, in files": {"cross_tuning": "off", **FILES},
    "by updates, in memory": {"cross_tuning": "update:3"},
    "by updates, plain where missing": {"cross_tuning": "update:3", "on_miss": "plain", **FILES},
}


def batches(epoch: int, rank: int = 0, world: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Other batches in every epoch, each padded to its longest; of several ranks each has its share of them."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
    made = []
    for rows in order.split(PER_BATCH)[rank::world]:
        both = [ids[rows] for ids in (SOURCE, TARGET)]
        made.append(tuple(ids[:, : int(ids.ne(PAD).sum(1).max())] for ids in both))
    return made


class Killed(Exception):
    """In place of a kill."""


def train(folder: Path, options: dict[str, Any], stop: int = 0, every: int = 3, rank: int = 0, world: int = 1) -> Any:
    """Train, from the last checkpoint if there is one; weights, random state, and the hits of each epoch."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(3)
    model = sharpened(TinyTranslator(0.2)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    regularizer = ADDrop(p=0.4, q=0.5, sites="*", probe="kept", store_folder=str(folder / "store"), **options)
    torch.manual_seed(rank)
    start, last, hits = 0, folder / f"last_{rank}.pt", {}
    with regularizer.attach(model):
        if last.exists():
            state = load_state(last, needed=("updates",))
            start = state["updates"]
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            regularizer.load_state_dict(state["regularizer"])
            torch.set_rng_state(state["random"])
        update = 0
        for epoch in range(1, EPOCHS + 1):
            for i, (source, target) in enumerate(batches(epoch, rank, world)):
                update += 1
                if update <= start:
                    continue
                if regularizer.epoch != epoch or i == 0:
                    regularizer.begin_epoch(epoch)
                told = {"encoder": Tokens(source, source.ne(PAD)), "decoder": Tokens(target, target.ne(PAD))}
                regularizer.supply(example_tokens=told, targets=target.masked_fill(target.eq(PAD), -100))
                loss_of(model(source, target), target).backward()
                if world > 1:
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
                regularizer.end_update()
                if update % every == 0:
                    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    states |= {"regularizer": regularizer.state_dict(), "random": torch.get_rng_state()}
                    save_state(last, {"updates": update, **states})
                if update == stop:
                    raise Killed
            sums = regularizer.statistics.take()
            hits[epoch] = sums.get("kept_hits", 0.0) / sums["kept_asked"] if sums.get("kept_asked") else None
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return weights, torch.get_rng_state(), hits, regularizer


def same(first: Any, second: Any) -> bool:
    return first[0].equal(second[0]) and first[1].equal(second[1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("one_thread")
def test_stopped_anywhere_and_continued(way, tmp_path):
    """With a checkpoint after every third of four updates an epoch, most of them stand inside one."""
    whole = train(tmp_path / "whole", WAYS[way])
    if "epochs" in way:
        assert whole[2] == {1: None, 2: 1.0, 3: None, 4: 1.0}
    for stop in (5, 10):
        folder = tmp_path / str(stop)
        for stopped in (stop, min(stop + 2, UPDATES - 1)):
            with pytest.raises(Killed):
                train(folder, WAYS[way], stopped)
        assert ("store_gb" in WAYS[way]) == bool(list(folder.glob("store/*.bin")))
        assert same(train(folder, WAYS[way]), whole), stop


def test_where_the_files_are_gone_it_says_so_and_goes_on(tmp_path, caplog):
    with pytest.raises(Killed):
        train(tmp_path, WAYS["epochs, in files"], 6)
    for file in tmp_path.glob("store/*"):
        file.unlink()
    with caplog.at_level(logging.WARNING):
        *_, hits, regularizer = train(tmp_path, WAYS["epochs, in files"])
    assert "12 of 12 examples' kept regions aren't in" in caplog.text
    assert hits[2] == 0 and hits[4] == 1 and len(regularizer.kept.store) == ROWS, "filled again"


def test_a_state_of_another_choice_of_sites_is_refused(tmp_path, classifier, translator):
    with pytest.raises(Killed):
        train(tmp_path, WAYS["epochs, in memory"], 4)
    state = load_state(tmp_path / "last_0.pt", needed=())["regularizer"]
    for model, sites, named in ((translator, "encoder.self", "choice of sites"), (classifier, "*", "model")):
        regularizer = ADDrop(sites=sites, probe="kept")
        with regularizer.attach(model), pytest.raises(ValueError, match=f"kept regions of another {named}"):
            regularizer.load_state_dict(state)


@pytest.mark.usefixtures("one_thread")
def test_a_state_may_be_loaded_before_attaching(translator, batch):
    with kept().attach(translator) as regularizer:
        run(regularizer, batch)
        regularizer.end_update()
        state = regularizer.state_dict()
    again, unfit = kept(), kept(sites="encoder.self")
    for one in (again, unfit):
        one.load_state_dict(state)
        assert one.state_dict()["kept"]["examples"] == 3
    with again.attach(copy.deepcopy(translator)):
        run(again, batch)
        assert not found(again, *batch).missing
    with unfit.attach(translator), pytest.raises(ValueError, match="kept regions of another choice of sites"):
        run(unfit, batch)


# -- two processes ----------------------------------------------------------------------------------------------------


def one_of_two(folder: Path) -> None:
    """Batches, and so examples, change ranks; the whole training, and one that is stopped twice."""
    dist.init_process_group("gloo")
    rank, ends = dist.get_rank(), []
    for name, stops in (("whole", ()), ("parts", (3, 5))):
        for stop in stops:
            dist.barrier()
            with contextlib.suppress(Killed):
                train(folder / name, WAYS["epochs, in memory"], stop, 2, rank, 2)
        dist.barrier()
        ends.append(train(folder / name, WAYS["epochs, in memory"], 0, 2, rank, 2)[:3])
    torch.save(ends, folder / f"{rank}.pt")


def test_two_processes_find_what_the_other_kept(tmp_path):
    check(tmp_path, run_in_processes(tmp_path, one_of_two, tmp_path, processes=2))
    orders = [torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)) for epoch in (1, 2)]
    first, second = (set(torch.cat(order.split(PER_BATCH)[::2]).tolist()) for order in orders)
    assert first != second, "examples change ranks"
    for rank in range(2):
        whole, parts = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert whole[2] == {1: None, 2: 1.0, 3: None, 4: 1.0} and same(parts, whole)
    stores = [sorted(path.name for path in (tmp_path / name / "store").iterdir()) for name in ("whole", "parts")]
    assert stores[0] == stores[1] and any(name.endswith("_1.bin") for name in stores[0])
