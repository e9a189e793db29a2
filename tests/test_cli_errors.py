"""Commands whose path cannot be used say so in one sentence, with the path and what to do, and leave nothing."""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from attn_reg_plugin.cli import main
from tests.experiments.report.run_folders import make_comparison


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one sentence of a command that refuses."""
    assert main([*map(str, words)]) == 2
    error = capsys.readouterr().err
    command = " ".join(map(str, words[: 1 + (words[0] in ("convert", "prepare"))]))
    assert error.startswith(f"attn-reg {command}: ") and error.count("\n") == 1 and "Errno" not in error
    return error


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs."""
    return make_comparison(tmp_path / "runs", {"plain": 20.0}, (1,))


def _loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop" / "x.html"


def _file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "x.html"


def _folder(folder: Path) -> Path:
    (folder / "x.html").mkdir()
    return folder / "x.html"


BAD_PATHS = {
    "a file as a folder": (_file, "must be a folder; "),
    "a folder as a file": (_folder, "this is a folder, but must be a file"),
    "a name too long": (lambda folder: folder / ("x" * 300 + ".html"), "the name is too long; give a shorter one"),
    "a loop of links": (_loop, "must be a folder; remove it, or give another path"),
}


@pytest.mark.parametrize("bad", BAD_PATHS)
def test_a_path_that_cannot_be_written(
    bad: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, expected = BAD_PATHS[bad]
    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    error = said(capsys, "report", runs, "--out", path)
    assert expected in error and str(path.parent if bad in ("a loop of links", "a file as a folder") else path) in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_that_is_just_short_enough(runs: Path, tmp_path: Path) -> None:
    """The temporary name beside it must be no longer."""
    path = tmp_path / ("x" * 250 + ".html")
    assert main(["report", str(runs), "--out", str(path)]) == 0 and path.is_file()


@pytest.mark.parametrize(
    "words",
    [
        ["export", "{}", "out"],
        ["report", "{}", "--out", "x.html"],
        ["compare", "{}", "--out", "runs"],
        ["finetune", "rte", "{}", "--out", "runs", "--model", "{}"],
        ["convert", "opus-mt", "{}", "out"],
        ["prepare", "wmt16", "--pair", "en-ro", "--source", "{}", "--out", "out"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("bad", BAD_PATHS)
def test_a_path_that_cannot_be_read(
    words: list[str], bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = BAD_PATHS[bad][0](tmp_path)
    error = said(capsys, *(word.format(path) for word in words))
    assert str(path)[:200] in error or str(path.parent) in error
    assert not (tmp_path / "runs").exists() and not (tmp_path / "out").exists()


def test_a_full_disk_leaves_the_old_file(
    runs: Path, tmp_path: Path, limited: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.html"
    out.write_text("old")
    before = sorted(tmp_path.iterdir())
    limited(20)
    error = said(capsys, "report", runs, "--out", out)
    assert str(out) in error and "larger than the system allows" in error
    assert out.read_text() == "old" and sorted(tmp_path.iterdir()) == before


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder in which this process, without root's rights, may not write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


@pytest.mark.parametrize("place", ["x.html", "new/x.html"])
def test_a_read_only_folder(place: str, read_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        made = make_comparison(Path(name), {"plain": 20.0}, (1,))
        error = said(capsys, "report", made, "--out", read_only / place)
    assert f"{read_only}/" in error and "permission denied; change the permissions" in error
    assert not list(read_only.iterdir())


WITHOUT_RICH = """
import sys
from attn_reg_plugin.cli import main
from tests.experiments.report.run_folders import make_comparison

class WithoutRich:
    def find_spec(self, name, path=None, target=None):
        if name == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name=name)

sys.meta_path.insert(0, WithoutRich())
sys.exit(main(["compare", "x", "--out", "y"]))
"""


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("attn_reg_plugin.commands.run", mock.Mock(side_effect=KeyboardInterrupt))
    assert main(["bench"]) == 130 and capsys.readouterr().err == "attn-reg bench: interrupted\n"


def test_a_package_that_is_not_installed() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_RICH], capture_output=True, text=True, check=False)
    said = "attn-reg compare: rich is not installed; in the checkout of this package, pip install '.[experiments]'"
    assert (done.returncode, done.stderr) == (2, f"{said} brings it\n")


def test_a_library_that_sets_up_logging_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As fairseq's wav2vec2_classification does at its import; warnings are heard as before."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    assert main(["user-dir"]) == 0
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("matplotlib.of.this.test").debug("noise")
    logging.getLogger("attn_reg_plugin.of.this.test").warning("heard")
    assert capsys.readouterr().err == "heard\n"
