"""The example programs run, and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(path: str) -> ModuleType:
    """An example as a module."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("one_thread")
def test_attend_out_in_a_loop_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    right, game = example("attend_out/loop.py").main()
    printed = capsys.readouterr().out.splitlines()
    assert game.state_dict()["rounds"] == 10 and [line.split(":")[0] for line in printed] == [
        f"round {i}" for i in range(1, 11)
    ]
    assert right > 0.8, "three languages: a third is chance"
