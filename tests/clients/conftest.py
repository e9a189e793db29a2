"""Each test skips where its client isn't installed."""

import importlib.util

import pytest

if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate", "datasets")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """Nothing is fetched."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
