"""One thread for every test here: the models are tiny. Without the frameworks there is nothing to test."""

import importlib.util

import pytest

if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _on_one_thread(one_thread):
    """See `one_thread`."""
