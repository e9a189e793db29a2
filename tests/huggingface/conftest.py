"""Without the frameworks there is nothing to test."""

import importlib.util

if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
    collect_ignore_glob = ["test_*.py"]
