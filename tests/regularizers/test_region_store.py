"""The store of kept regions: memory, then files; what a kill at any moment finds; what is refused, what dropped."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from attn_reg_plugin.regularizers.region_files import VERSION, Setting, file_name
from attn_reg_plugin.regularizers.region_store import RegionStore, free_memory

OURS = {"version": VERSION, "model": "Tiny of 9 parameters", "tokenizer": "a1", "choice of sites": "encoder.self[0]"}
HIGH = Setting(0.3, "high")
SIZE = 2 * 5 * 1  # bytes of an example: heads, queries, bytes a row
PARTS = ((0, 0, 2, 5, 5),)
NO_MEMORY = 1e-9  # 1 byte


def name(i):
    return bytes([i]) * 16


def bits(i, update=0):
    return torch.full((SIZE,), (7 * i + update) % 256, dtype=torch.uint8)


def put(store, update, *examples, setting=HIGH):
    for i in examples:
        store.put(name(i), update, setting, PARTS, bits(i, update))


def holds(store, **updates):
    """Of each example, `e3=7`: made in update 7; None where nothing is kept."""
    for example, update in updates.items():
        i = int(example[1:])
        kept = store.get(name(i))
        if update is None:
            assert kept is None, example
        else:
            assert kept.update == update and kept.parts == PARTS and kept.read().equal(bits(i, update)), example
    return True


def opened(folder, gb=NO_MEMORY, rank=0, world=1, resumed=None, epoch=1, saved=None, state=None, **other):
    store = RegionStore(gb, {**OURS, **other})
    if state is not None:
        store.load(state)
    store.open(folder, rank, world, resumed)
    store.begin_epoch(epoch, saved)
    return store


def files(folder):
    return sorted(path.name for path in folder.iterdir())


# -- what is kept, and where ------------------------------------------------------------------------------------------


def test_memory_first_then_files(tmp_path):
    store = opened(tmp_path, gb=3.5 * SIZE / 2**30)
    put(store, 0, 1, 2, 3)
    assert not files(tmp_path) and store.in_memory == 3 * SIZE
    put(store, 1, 4, 5)
    assert files(tmp_path) == ["ad_drop_regions_1_0.bin"] and store.in_memory == 3 * SIZE and len(store) == 5
    put(store, 2, 1, 4)  # in place of the older ones
    assert store.in_memory == 3 * SIZE and holds(store, e1=2, e2=0, e3=0, e4=2, e5=1, e6=None)
    low = Setting(0.25, "low")
    put(store, 3, 5, setting=low)
    assert store.get(name(5)).setting == low


def test_without_a_folder_it_says_what_it_leaves_out(caplog):
    store = opened(None, gb=2.5 * SIZE / 2**30)
    with caplog.at_level(logging.WARNING):
        put(store, 0, 1, 2, 3, 4)
    assert holds(store, e1=0, e2=0, e3=None, e4=None) and caplog.text.count("give store_folder") == 1
    put(store, 1, 2)
    assert holds(store, e2=1)


def test_the_default_is_a_quarter_of_the_free_memory():
    assert free_memory() > 2**20
    assert 2**20 < RegionStore(0.0, OURS).limit <= 8 * 2**30
    assert RegionStore(0.5, OURS).limit == 2**29


def test_a_full_disk_is_told_of(tmp_path, caplog, monkeypatch):
    store = opened(tmp_path)
    put(store, 0, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("os.pwrite", full)
        put(store, 1, 2, 3)
    assert caplog.text.count("No space left on device") == 1
    put(store, 2, 4)
    assert holds(store, e1=0, e2=None, e3=None, e4=2)


# -- a training that goes on ------------------------------------------------------------------------------------------


def test_what_was_made_after_the_checkpoint_is_cut(tmp_path):
    store = opened(tmp_path, gb=1.5 * SIZE / 2**30)
    put(store, 0, 1, 2)
    put(store, 1, 3)
    state = store.state()
    before = file_name(tmp_path, 1, 0).read_bytes()
    put(store, 2, 2, 4)
    with file_name(tmp_path, 1, 0).open("ab") as file:
        file.write(b"KEPT torn")  # the kill
    again = opened(tmp_path, gb=1.5 * SIZE / 2**30, resumed=2, state=state)
    assert file_name(tmp_path, 1, 0).read_bytes() == before
    assert holds(again, e1=0, e2=0, e3=1, e4=None) and len(again) == state["examples"] == 3
    put(again, 2, 2, 4)
    assert holds(again, e1=0, e2=2, e3=1, e4=2)
    assert files(tmp_path) == ["ad_drop_regions_1_0.bin"]


@pytest.mark.parametrize("checkpoint", ["in an epoch", "between epochs"])
def test_a_kill_at_any_update_finds_what_the_last_checkpoint_needs(tmp_path, checkpoint):
    """Epochs of two updates; a checkpoint every fifth update, or every second epoch; killed twice on the way."""
    every = 5 if checkpoint == "in an epoch" else 4
    for killed in range(1, 22):
        folder = tmp_path / str(killed)
        folder.mkdir()
        truth, last, stops = {}, None, [killed, killed + 3, None]
        for stop in stops:
            update = 0 if last is None else last["update"]
            truth = {} if last is None else dict(last["truth"])
            epoch = update // 2 + 1
            saved = None if last is None else epoch
            store = opened(folder, resumed=None if last is None else update, epoch=epoch, saved=saved,
                           state=None if last is None else last["state"])  # fmt: skip
            assert holds(store, **truth), (killed, stop, update)
            while update < (26 if stop is None else stop):
                if update // 2 + 1 != epoch:
                    epoch = update // 2 + 1
                    store.begin_epoch(epoch, saved)
                if epoch % 2 or epoch > 8:  # what isn't recorded for long is still there
                    examples = [1, 2] if update % 2 else [3, epoch % 7 + 4]
                    put(store, update, *examples)
                    truth.update({f"e{i}": update for i in examples})
                update += 1
                if update % every == 0:
                    last, saved = {"update": update, "truth": dict(truth), "state": store.state()}, epoch
            assert holds(store, **truth)
            store.close()
        assert len(files(folder)) <= 9, "what nobody needs is removed"


def test_old_files_are_removed(tmp_path):
    store = opened(tmp_path)
    for epoch in range(1, 8):
        store.begin_epoch(epoch, epoch - 1 or None)
        put(store, epoch, 1, 2, 3)
        if epoch == 1:
            put(store, epoch, 9)
    store.begin_epoch(8, 7)
    needed = [1, 6, 7]  # the sixth's were in use as epoch 7 began, in which the last checkpoint was made
    assert files(tmp_path) == [f"ad_drop_regions_{epoch}_0.bin" for epoch in needed] and holds(store, e9=1, e2=7)


def test_a_training_that_begins_anew_has_nothing(tmp_path):
    put(opened(tmp_path), 0, 1, 2)
    assert files(tmp_path) and holds(opened(tmp_path), e1=None) and not files(tmp_path)


def test_numpy_is_not_needed(tmp_path):
    code = f"""
import sys
sys.modules["numpy"] = None
from tests.regularizers.test_region_store import *
from pathlib import Path
folder = Path({str(tmp_path)!r})
store = opened(folder)
put(store, 0, 1)
assert holds(opened(folder, resumed=1, state=store.state()), e1=0)
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


# -- damage, and what is another's ------------------------------------------------------------------------------------


def damage(path, at, what):
    content = bytearray(path.read_bytes())
    content[at : at + len(what)] = what
    path.write_bytes(content)


@pytest.mark.parametrize("where", ["payload", "size", "magic", "end", "title", "empty", "length of the title"])
def test_a_damaged_file_is_told_of_and_filled_again(tmp_path, caplog, where):
    store = opened(tmp_path)
    put(store, 0, 1, 2, 3)
    state, path = store.state(), file_name(tmp_path, 1, 0)
    second = store.get(name(2)).record.offset
    store.close()
    if where in ("end", "empty"):
        path.write_bytes(path.read_bytes()[: second if where == "end" else 0])
    else:
        start = path.read_bytes().index(b"KEPT", second - 100 + 30)
        title = len(b"attn_reg_plugin kept regions\n")
        places = {"payload": second + 3, "magic": start, "size": second - 14 - 8 + 6, "title": 2}
        damage(path, places.get(where, title), b"\xff\xfe")
    with caplog.at_level(logging.WARNING):
        again = opened(tmp_path, resumed=1, state=state)
    assert "is damaged" in caplog.text and len(again) < state["examples"]
    if where == "payload":
        assert holds(again, e1=0, e2=None, e3=0)
    put(again, 1, 1, 2, 3)
    assert holds(again, e1=1, e2=1, e3=1)
    caplog.clear()
    again = opened(tmp_path, resumed=2, state=again.state())
    assert holds(again, e1=1, e2=1, e3=1) and ("damaged" not in caplog.text or where == "payload")


@pytest.mark.parametrize("what", list(OURS))
def test_another_ones_regions_are_refused_by_name(tmp_path, what):
    store = opened(tmp_path)
    put(store, 0, 1)
    other = {what: 99 if what == "version" else "another"}
    with pytest.raises(ValueError, match=rf"{what} \(.*, but now it is (99|another)\)"):
        opened(tmp_path, resumed=1, **other)
    with pytest.raises(ValueError, match=f"the checkpoint has kept regions of another {what}"):
        RegionStore(0.0, {**OURS, **other}).load(store.state())


@pytest.mark.parametrize("key", ["fingerprint", "bits", "shapes", "updates", "sizes"])
def test_a_state_that_is_none_is_refused(key):
    store = opened(None, gb=1.0)
    put(store, 0, 1, 2)
    state = store.state()
    for broken in ({k: v for k, v in state.items() if k != key}, {**state, key: torch.zeros(0)}):
        with pytest.raises(ValueError):
            RegionStore(0.0, OURS).load(broken)


# -- several ranks ----------------------------------------------------------------------------------------------------


def test_every_rank_finds_what_the_others_kept_in_earlier_epochs(tmp_path):
    ranks = [opened(tmp_path, gb=1.0, rank=rank, world=2) for rank in range(2)]
    put(ranks[0], 0, 1, 2, 7)
    put(ranks[1], 0, 3, 4, 7)  # twice in the data, trained on by both in the same update
    put(ranks[1], 1, 2)
    assert files(tmp_path) == ["ad_drop_regions_1_0.bin", "ad_drop_regions_1_1.bin"], "several always use files"
    assert ranks[0].get(name(3)) is None
    for store in ranks:
        store.begin_epoch(2, None)
        assert holds(store, e1=0, e2=1, e3=0, e4=0)
        assert store.get(name(7)).file.rank == 0, "both take the same"
    put(ranks[0], 2, 3)
    put(ranks[1], 3, 1)
    again = [opened(tmp_path, rank=rank, world=2, resumed=3) for rank in range(2)]
    for store in again:
        store.begin_epoch(2, 2)
    assert holds(again[0], e1=0, e2=1, e3=2, e4=0) and holds(again[1], e1=0, e2=1, e3=0, e4=0)
    for store in again:
        store.begin_epoch(3, 2)
        assert holds(store, e1=0, e2=1, e3=2, e4=0)


def test_what_another_rank_needs_is_not_removed(tmp_path):
    """Both see the same regions as an epoch begins, so both need the same files."""
    ranks = [opened(tmp_path, rank=rank, world=2) for rank in range(2)]
    put(ranks[0], 0, 1, 2)
    put(ranks[1], 0, 2, 3)
    for epoch in range(2, 6):
        for store in ranks:
            store.begin_epoch(epoch, epoch - 1)
        put(ranks[epoch % 2], epoch, 1, 3)
    for store in ranks:
        store.begin_epoch(6, 5)
    assert "ad_drop_regions_1_0.bin" in files(tmp_path) and "ad_drop_regions_1_1.bin" not in files(tmp_path)
    for rank in range(2):
        assert holds(opened(tmp_path, rank=rank, world=2, resumed=9, epoch=6, saved=6), e1=5, e2=0, e3=5)


def test_fewer_ranks_go_on_with_all_and_remove_what_is_old(tmp_path):
    ranks = [opened(tmp_path, rank=rank, world=3) for rank in range(3)]
    for rank, store in enumerate(ranks):
        put(store, 0, rank)
    alone = opened(tmp_path, gb=1.0, resumed=1)
    assert holds(alone, e0=0, e1=0, e2=0)
    for epoch in (2, 3):
        alone.begin_epoch(epoch, epoch - 1)
        put(alone, epoch, 0, 1, 2)
    alone.begin_epoch(4, 3)
    assert not files(tmp_path) and holds(alone, e0=3, e1=3, e2=3)
