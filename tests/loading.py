"""Programs of examples/, scripts/ and docs/ as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).parents[1]


def load(path: str) -> ModuleType:
    """The module of a file of the repository, which may import those beside it."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # where dataclasses look for it
    with mock.patch.object(sys, "path", [str((ROOT / path).parent), *sys.path]):
        specification.loader.exec_module(module)
    return module


def example(path: str) -> ModuleType:
    """The module of a program in examples/."""
    return load(f"examples/{path}")
