"""Pictures: matplotlib, which only they need, and files of them, whole or not at all."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from attn_reg_plugin.files import naming_writer, whole_file


def load_matplotlib(wanted_for: str) -> ModuleType:
    """matplotlib.

    Args:
        wanted_for: the picture that the message names.

    Raises:
        ValueError: it is not installed.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq opens the log to all that it says
    try:
        import matplotlib.figure
    except ImportError:
        raise ValueError(
            f"{wanted_for} needs matplotlib, which is not installed; `pip install matplotlib` brings it"
        ) from None
    return matplotlib


def plain_text(text: str) -> str:
    """A text of a user's as matplotlib shows it: dollars begin no formula."""
    return text.replace("$", r"\$")


def save(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write a picture of matplotlib's, whole or not at all, and the folder that it is in.

    Args:
        path: the file to write; its ending names the format, such as .png or .pdf.
        dpi: pixels per inch.

    Raises:
        OSError: with `path`, where it cannot be written.
        ValueError: matplotlib does not know the format.
    """
    if path.suffix.removeprefix(".").lower() not in (known := figure.canvas.get_supported_filetypes()):
        raise ValueError(f"the name of the picture {path} must end in one of .{', .'.join(sorted(known))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished, naming_writer(path):
        figure.savefig(unfinished, dpi=dpi, format=path.suffix.removeprefix("."))
