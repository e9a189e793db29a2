"""Readers take files that have an end: no device, no pipe."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_reg_plugin import configuration, files
from attn_reg_plugin.checkpoints import load_weights
from attn_reg_plugin.dictionaries import read_dictionary
from attn_reg_plugin.labelled import find_task, read_file

READERS: dict[str, Callable[[Path], object]] = {
    "lines": lambda path: next(files.read_lines(path)),
    "JSON": files.read_json,
    "hash": files.sha256,
    "dictionary": read_dictionary,
    "weights": load_weights,
    "settings": configuration.load,
    "labelled text": lambda path: read_file(find_task("rte"), path),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("what", ["device", "pipe"])
def test_endless_files_are_refused(reader: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if what == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    with pytest.raises(ValueError, match=r"file is not a regular file, but a device, a pipe or a socket"):
        READERS[reader](path)
