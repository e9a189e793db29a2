"""Somebody's own translators train with every method, by one command."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CUSTOM = Path(__file__).resolve().parents[1] / "examples" / "custom_seq2seq"
METHODS = {"none", "ad_drop", "attend_out", "attention_layer_drop", "scheduled_dropout"}


def load(name: str):
    """A file of the example as a module."""
    specification = importlib.util.spec_from_file_location(f"custom_{name}", CUSTOM / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_both_faces_with_every_method_by_one_command(tmp_path: Path) -> None:
    sizes = ["--sentences", "128", "--epochs", "3", "--width", "16", "--out", str(tmp_path)]
    finished = subprocess.run(
        [sys.executable, str(CUSTOM / "run.py"), *sizes],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    rows = [line.split() for line in finished.stdout.splitlines() if line.endswith("nats a letter")]
    for face, chance in (("loop", math.log(0x250)), ("fairseq", 4.6)):
        losses = {method: float(loss) for name, method, loss, *_ in rows if name == face}
        assert set(losses) == METHODS and all(loss < chance for loss in losses.values())
        assert len(set(losses.values())) == len(METHODS), "every method trains in its own way"
    for method in METHODS - {"none"}:
        assert "drop_decoder.cross[1]" in (tmp_path / method / "log.txt").read_text()


@pytest.mark.usefixtures("one_thread")
def test_the_loop_learns_and_its_padding_does_not_matter() -> None:
    loop = load("loop")
    losses = loop.train("ad_drop", epochs=2, sentences=64, width=16)
    assert losses[-1] < losses[0]
    model = loop.Translator(width=16).eval()
    source, target = loop.letters(["Hello."]), loop.letters(["Salut."], [loop.START])
    padded = torch.nn.functional.pad(source, (0, 5))
    assert torch.allclose(model(source, target), model(padded, target), atol=1e-5)
    longer = torch.nn.functional.pad(target, (0, 3), value=7)
    assert torch.allclose(model(source, longer)[:, : target.size(1)], model(source, target), atol=1e-5)
