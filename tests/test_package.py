"""The package itself: what importing it loads, its public names, its files, and what a checkpoint may hold."""

import argparse
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import attn_reg_plugin

PACKAGE = Path(attn_reg_plugin.__file__).parent
PUBLIC = {"ADDrop", "AttentionSite", "candidate_region", "drop_candidates", "find_sites", "gradient_attribution"}
PUBLIC |= {"recording", "regularized_attention"}


def test_importing_loads_torch_only():
    """Beyond what a fresh interpreter has loaded with torch there is the package, and the standard library."""
    code = """
import sys, torch
before = set(sys.modules)
import attn_reg_plugin, attn_reg_plugin.regularizers, attn_reg_plugin.attention
print(*{name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["attn_reg_plugin"]


def test_public_names_exist():
    assert set(attn_reg_plugin.__all__) >= PUBLIC
    assert attn_reg_plugin.__all__ == sorted(attn_reg_plugin.__all__)
    assert all(getattr(attn_reg_plugin, name).__doc__ for name in attn_reg_plugin.__all__)


def test_importing_is_enough_to_read_checkpoints(tmp_path):
    """All kinds of value in one of fairseq's; in an interpreter in which nothing else has changed what is allowed."""
    state = {
        "args": argparse.Namespace(lr=[0.1], arch="transformer", nested=argparse.Namespace(p=0.3)),
        "meters": [np.float64(1.5), np.float32(0.5), np.float16(2.0), np.int64(7), np.int32(3), np.bool_(True)],
        "array": np.arange(4.0),
        "model": {"weight": torch.randn(2, 2), "half": torch.randn(2).bfloat16()},
        "history": [{"epoch": 1}, (1, 2.0, None, "x", True)],
    }
    torch.save(state, tmp_path / "checkpoint.pt")
    code = """
import pickle, sys, torch
try:
    torch.load(sys.argv[1], weights_only=True)
except pickle.UnpicklingError:
    import attn_reg_plugin
    print(torch.load(sys.argv[1], weights_only=True)["meters"])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoint.pt")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{state['meters']}\n"


def test_a_wheel_holds_every_file_of_the_package(monkeypatch):
    import setuptools

    given, root = {}, PACKAGE.parent
    monkeypatch.chdir(root)
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path("setup.py")
    build = setuptools.Distribution(given | {"script_name": "setup.py"}).get_command_obj("build_py")
    build.ensure_finalized()
    modules = {path for _, _, path in build.find_all_modules()}
    data = {str(Path(folder, name)) for _, folder, _, names in build.data_files for name in names}
    there = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert modules | data == {str(path.relative_to(root)) for path in there}
    assert {"attn_reg_plugin/py.typed", "attn_reg_plugin/corpora/phrasebook.tsv.gz"} <= data
