"""Additions to the pages as mkdocs builds them: the list of methods of the API, and pages that stand elsewhere.

`<!-- api of the methods -->` is replaced by an entry for each registered method. The README is the first page; the
READMEs of the examples, CONTRIBUTING.md and CHANGELOG.md become pages as they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: pages outside of docs/, and what is shown beside them
OUTSIDE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"examples/*/{name}" for name in ("README.md", "*.png", "*.yaml", "*.json")),
)
#: the first page, which is the README
INDEX = "index.md"


def api_of_methods() -> str:
    """Say what mkdocstrings is to show of every method: the class, since its hooks are for those who write one."""
    from attn_reg_plugin.regularizers import REGISTRY

    parts = []
    for name, method in sorted(REGISTRY.items()):
        parts.append(f"::: {method.__module__}.{method.__qualname__}\n    options:\n      members: []")
        parts.append(f"Defaults: [flags of `{name}`](flags.md#{name}).")
    return "\n\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand outside of docs/, the README as the first one."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, INDEX, abs_src_path=str(ROOT / "README.md")))
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            address = path.relative_to(ROOT).as_posix()
            if files.get_file_from_path(address) is None:
                files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill the list of methods; the site has the pages of docs/ beside those from outside of it."""
    if page.file.src_uri == INDEX or (ROOT / page.file.src_uri).exists():
        markdown = re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    else:
        markdown = markdown.replace("](../", "](").replace("](README.md", f"]({INDEX}")
    return markdown.replace("<!-- api of the methods -->", api_of_methods())
