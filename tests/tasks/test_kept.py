"""AD-DROP that keeps regions, under fairseq: its log, kills while the store is written, and what is damaged."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from tests.tasks.fairseq_runs import AD_DROP, Job, differing, train, train_arguments
from tests.tasks.kills import die_while_keeping, everything, kill_after, kill_while

pytestmark = pytest.mark.slow

KEPT = [*AD_DROP, *shlex.split("--attn-sites * --ad-drop-probe kept --ad-drop-cross-tuning epoch")]
#: 160 examples in 6 updates an epoch; most of what is kept is in files
FLAGS = shlex.split("--ad-drop-store-gb 5e-6 --save-interval-updates 4 --keep-interval-updates 1 --max-update 16")


def test_kills_while_the_store_is_written_change_nothing(corpus: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finished = train(corpus, whole, *KEPT, *FLAGS).check()
    lines = finished.lines()
    assert [line["regularized"] for line in lines] == ["0"] * 6 + ["1"] * 6 + ["0"] * 4
    assert [line.get("kept_hit_rate") for line in lines] == [None] * 6 + ["1"] * 6 + [None] * 4
    assert {line["probe_share"] for line in lines} == {"0"}, "no probe was run"
    by_epoch = finished.lines("train")
    # the bytes of 6 maps of 2 heads of 2 to 9 tokens a side, a row of up to 8 keys a byte
    assert 6 * 2 * 3 < float(by_epoch[0]["train_kept_bytes_per_example"]) < 6 * 2 * 9 * 2
    arguments = train_arguments(corpus, parts, *KEPT, *FLAGS)
    kill_while(die_while_keeping, 95, arguments, tmp_path / "1.log")
    kill_after(Job("train", arguments, tmp_path / "2.log"), 5, random.Random(0))
    files = {path.name for path in parts.glob("ad_drop_regions_*")}
    assert "ad_drop_regions_1_0.bin" in files
    resumed = train(corpus, parts, *KEPT, *FLAGS).check()
    assert len(resumed.lines()) < 16 and "starts anew" not in resumed.output
    assert differing(everything(parts), everything(whole)) == []


def test_a_damaged_store_is_told_of_and_filled_again(corpus: Path, tmp_path: Path) -> None:
    """The state beside the checkpoint and the file are torn: the training goes on without what was kept."""
    train(corpus, tmp_path, *KEPT, *FLAGS, "--max-update", "6").check()
    (tmp_path / "attn_reg_state_6.pt").write_bytes(b"half of it")
    finished = train(corpus, tmp_path, *KEPT, *FLAGS, "--ad-drop-on-miss", "plain", "--max-update", "20").check()
    assert "it is left out, and what it held is made anew" in finished.output
    rates = {line["epoch"]: line.get("kept_hit_rate") for line in finished.lines()}
    assert rates == {2: "0", 3: None, 4: "1"}
    other = train(corpus, tmp_path, *KEPT, *FLAGS, "--attn-sites", "encoder.self", "--max-update", "22")
    assert other.status != 0 and "has kept regions of another choice of sites" in other.output
