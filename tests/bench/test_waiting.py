"""On a GPU no step waits for the device but where it must: the host runs ahead of it."""

from __future__ import annotations

import pytest
import torch

from attn_reg_plugin.bench.families import Workload
from attn_reg_plugin.bench.measure import STEPS
from attn_reg_plugin.bench.rows import all_rows
from tests.attention.tiny_model import VOCABULARY, TinyTranslator

#: passes that are compared read their real tokens
READING = ("r_drop", "hidden_cut")
ROWS = [row for row in all_rows() if row.kind == "training" and row.method]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("row", [row for row in ROWS if not row.name.startswith(READING)], ids=lambda row: row.name)
def test_no_step_waits_for_the_device(row) -> None:
    """The models of fairseq and transformers ask for padding, and so wait themselves."""
    model = TinyTranslator(0.1).cuda()
    tokens = torch.randint(1, VOCABULARY, (4, 16), device="cuda")
    work = Workload(model, {"source": tokens, "target": tokens}, tokens, {"encoder": "source", "decoder": "target"})
    with STEPS[row.kind](row, work, False) as step:
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
            with pytest.raises(RuntimeError, match="synchronizing"):
                work.targets.sum().item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
