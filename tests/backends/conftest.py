"""Without a framework there is nothing to test of its backend."""

import importlib.util

_NEEDED = {"fairseq": "test_fairseq_*.py", "transformers": "test_[cdh]*.py"}
collect_ignore_glob = [files for name, files in _NEEDED.items() if importlib.util.find_spec(name) is None]
