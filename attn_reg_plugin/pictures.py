"""Pictures: matplotlib, which only they need, and files of them, whole or not at all."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from attn_reg_plugin.files import naming_writer, whole_file


def load_matplotlib() -> ModuleType:
    """matplotlib, without the messages that fairseq opens the log to; a ModuleNotFoundError where it is missing."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    import matplotlib.figure

    return matplotlib


def plain_text(text: str) -> str:
    """A text of a user's as matplotlib shows it: dollars begin no formula."""
    return text.replace("$", r"\$")


def save(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write a picture of matplotlib's, whole or not at all; an OSError names `path`, whose ending is the format."""
    with whole_file(path) as unfinished, naming_writer(path):
        figure.savefig(unfinished, dpi=dpi, format=path.suffix.removeprefix("."))
