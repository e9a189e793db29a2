"""Who imports what, file by file: what import-linter's contracts cannot say."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from attn_reg_plugin.backends import FRAMEWORKS

PACKAGE = Path(__file__).parents[1] / "attn_reg_plugin"
CORE = ("torch", "attn_reg_plugin.attention", "attn_reg_plugin.regularizers")
#: PyYAML, inside the one function that reads a schedule file
EXCEPTIONS = {"regularizers/scheduled_dropout.py": ("yaml",)}


def imported(source: str) -> set[str]:
    """The modules that a file imports, wherever it does; a relative import begins with its dots."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "attn_reg_plugin" else {module}
    return found


def others(source: str, *allowed: str) -> set[str]:
    """What a file imports beside the standard library and `allowed`, with their parts."""
    return {
        name
        for name in imported(source)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == one or name.startswith(f"{one}.") for one in allowed)
    }


@pytest.mark.parametrize("room", ["attention", "regularizers"])
def test_the_core_imports_torch_and_the_standard_library_only(room: str) -> None:
    files = {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in (PACKAGE / room).rglob("*.py")
    }
    found = {name: others(source, *CORE, *EXCEPTIONS.get(name, ())) for name, source in files.items()}
    assert len(found) > 5
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_a_backend_imports_the_framework_that_its_name_begins_with() -> None:
    """A file in `huggingface/` transformers, `fairseq_NAME.py` fairseq, another file the package it is called after."""
    found = {}
    for path in (PACKAGE / "backends").rglob("*.py"):
        name = str(path.relative_to(PACKAGE / "backends"))
        top = name.removesuffix(".py").split("/")[0]
        framework = FRAMEWORKS.get(top.split("_")[0], top).split(".")[0]
        found[name] = others(path.read_text(encoding="utf-8"), framework, *CORE, "attn_reg_plugin.backends")
    assert {"fairseq.py", "huggingface/projected.py"} <= found.keys()
    assert {name: modules for name, modules in found.items() if modules} == {}
