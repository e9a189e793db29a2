"""On a GPU no step waits for the device but where it must: the host runs ahead of it."""

from __future__ import annotations

import time

import pytest
import torch

from attn_reg_plugin.bench.families import Settings, build_workload
from attn_reg_plugin.bench.measure import STEPS
from attn_reg_plugin.bench.rows import all_rows

#: the kept probe reads token ids, a round of AttendOut its rewards, and passes that are compared their real tokens
READING = ("kept", "attend_out", "r_drop", "hidden_cut")
ROWS = [row for row in all_rows() if row.kind == "training" and row.exists("torch", "float32")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("row", [row for row in ROWS if not row.name.startswith(READING)], ids=lambda row: row.name)
def test_no_step_waits_for_the_device(row) -> None:
    work = build_workload(Settings("torch", "tiny", batch=4, length=16, shortest=0.75, vocabulary=50, device="cuda"))
    with STEPS[row.kind](row, work, False, time.perf_counter) as step:
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
            with pytest.raises(RuntimeError, match="synchronizing"):
                work.targets.sum().item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
