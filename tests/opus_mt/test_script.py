"""scripts/opus_mt.sh gives each command its flags."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "opus_mt.sh"
BASH = shutil.which("bash") or "/bin/bash"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script beside a setup.sh that does nothing, an `attn-reg` that prints its arguments, and a model."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for path, text in {
        tmp_path / "scripts" / "setup.sh": "",
        binaries / "attn-reg": "printf '<%s>' \"$@\"; echo\n",
    }.items():
        path.write_text(f"#!{BASH}\n{text}", encoding="utf-8")
        path.chmod(0o755)
    (tmp_path / "o" / "model").mkdir(parents=True)
    (tmp_path / "o" / "model" / "fairseq.flags").write_text("--arch opus_mt --encoder-layers 2\n", encoding="utf-8")
    (tmp_path / "o" / "data").mkdir()
    manifest = {"splits": {"train": {"kept": 33}}}
    (tmp_path / "o" / "data" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return tmp_path / "scripts" / "opus_mt.sh"


def call(script: Path, *words: str, model: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("ATTN_REG_VENV", "HF_MODEL")}
    environment |= {"HF_MODEL": model} if model else {}
    folder = script.parents[1]
    return subprocess.run([BASH, str(script), *words], capture_output=True, text=True, env=environment, cwd=folder)


@pytest.mark.parametrize(("pair", "p", "q"), [("en-ro", "0.2", "0.2"), ("tr-en", "0.6", "0.1")])
def test_the_flags_of_the_authors(pair: str, p: str, q: str, script: Path) -> None:
    prepare, compare = call(script, pair, "--out", "o", "--limit=9", "--cpu", "--", "--fp16").stdout.splitlines()
    assert prepare.startswith(f"<prepare><wmt16><--pair><{pair}><--out><o/data><--opus-mt><o/model><--source><hub>")
    assert prepare.endswith("<--max-pieces><128><--limit><9>")
    assert compare.startswith("<compare><o/data><--out><o><--methods><untuned,plain,ad_drop>")
    assert f"<ad_drop=--ad-drop-p {p} --ad-drop-q {q}>" in compare
    for part in ("<--epochs><5><--lr><2e-5>", "<--weight-decay><0.01>", "<--batch-size><16>", "<--cpu>"):
        assert part in compare
    assert "<--total-num-update><15>" in compare, "5 epochs of 3 batches"
    assert "<--distributed-world-size><1>" in compare, "for which the updates are counted"
    assert "<--><--arch><opus_mt><--encoder-layers><2><--finetune-from-model><o/model/checkpoint.pt>" in compare
    assert "--bpe opus_mt --opus-mt-folder o/data/opus_mt --min-len 0" in compare and compare.endswith("<--fp16>")


def test_a_model_is_converted_once(script: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "o" / "model")
    (tmp_path / "mine").mkdir()
    local = call(script, "en-ro", "--out", "o", model="mine").stdout.splitlines()
    assert local[0] == "<convert><opus-mt><mine><o/model><--languages><en-ro>"
    named = call(script, "en-ro", "--out", "o").stdout.splitlines()
    assert named[0] == "<convert><opus-mt><--hf-model><Helsinki-NLP/opus-mt-en-ro><o/model><--languages><en-ro>"


def test_a_folder_belongs_to_one_model(script: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "o" / "model")
    call(script, "en-ro", "--out", "o")
    (tmp_path / "o" / "model").mkdir()
    assert call(script, "en-ro", "--out", "o", model="other").stderr == (
        "opus_mt.sh: o was begun with Helsinki-NLP/opus-mt-en-ro, not other; give another --out\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "must be en-ro or tr-en, given: nothing"),
        (["ro-en"], "given: ro-en"),
        (["en-ro", "--limit"], "--limit wants a value"),
        (["en-ro", "more"], "unexpected argument: more"),
    ],
)
def test_what_is_refused(words: list[str], said: str, script: Path) -> None:
    result = call(script, *words)
    assert result.returncode == 2 and said in result.stderr
