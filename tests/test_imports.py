"""Imports, file by file, beyond what import-linter's contracts can say."""

import ast
import sys
from pathlib import Path

from attn_reg_plugin.backends import FRAMEWORKS

PACKAGE = Path(__file__).parents[1] / "attn_reg_plugin"
CORE = {"torch", "attn_reg_plugin.attention", "attn_reg_plugin.regularizers"}


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


def allowed(name: str) -> set[str]:
    """The core has torch; a backend the framework that its name begins with, or the package it is called after."""
    room, _, rest = name.partition("/")
    top = rest.removesuffix(".py").split("/")[0]
    framework = FRAMEWORKS.get(top.split("_")[0], top).split(".")[0]
    return CORE | ({framework, "attn_reg_plugin.backends"} if room == "backends" else set())


def test_the_core_and_the_backends_import_what_they_may_beside_the_standard_library() -> None:
    paths = [path for room in ("attention", "regularizers", "backends") for path in (PACKAGE / room).rglob("*.py")]
    names = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in paths}
    assert {"backends/fairseq.py", "backends/huggingface/projected.py", "regularizers/r_drop.py"} <= names.keys()
    for name, source in names.items():
        foreign = {module for module in imported(source) if module.split(".")[0] not in sys.stdlib_module_names}
        assert not [one for one in foreign if not f"{one}.".startswith(tuple(f"{a}." for a in allowed(name)))], name
