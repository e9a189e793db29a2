"""Checkpoints and run folders that version 0.1 made still load; see tests/fixtures/README.md."""

from __future__ import annotations

import json
import shlex
import tarfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

from attn_reg_plugin import ADDrop, AttendOut
from attn_reg_plugin.cli import main
from tests.tasks.fairseq_runs import read_checkpoint, train

ARCHIVE = Path(__file__).parent / "fixtures" / "version_0_1.tar.gz"
MODEL = shlex.split(
    "--arch transformer --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 8 --decoder-embed-dim 8 "
    "--encoder-ffn-embed-dim 8 --decoder-ffn-embed-dim 8 --encoder-attention-heads 2 --decoder-attention-heads 2 "
    "--share-all-embeddings --dropout 0.1"
)
METHODS = {
    "ad_drop": "--attn-reg ad_drop --ad-drop-p 0.4 --ad-drop-q 0.5 --ad-drop-cross-tuning update:2",
    "attend_out": "--attn-reg attend_out --attend-out-steps 3",
}
REGULARIZERS = {
    "ad_drop": lambda: ADDrop(p=0.4, q=0.5, cross_tuning="update:2"),
    "attend_out": lambda: AttendOut(steps=3),
}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What version 0.1 made."""
    folder = tmp_path_factory.mktemp("version_0_1")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_fairseq_training_continues(earlier: Path, method: str) -> None:
    folder, flags = earlier / f"fairseq_{method}", [*shlex.split(METHODS[method]), "--max-update", "8"]
    finished = train(earlier / "corpus" / "bin", folder, *flags, "-s", "en", "-t", "ro", model=MODEL).check()
    assert [line["num_updates"] for line in finished.lines()] == ["6", "7", "8"]
    assert "starts anew" not in finished.output
    assert read_checkpoint(folder / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 8


@pytest.mark.parametrize("method", REGULARIZERS)
def test_a_trainer_continues(earlier: Path, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

    from attn_reg_plugin.huggingface import AttnRegCallback

    def examples(seed: int) -> list[dict]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 20, (16, 6), generator=generator)
        return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0]) % 2} for row in ids]

    checkpoint = earlier / f"trainer_{method}" / "checkpoint-5"
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    arguments = TrainingArguments(
        tmp_path,
        max_steps=8,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    regularizer = REGULARIZERS[method]()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=examples(1),
        eval_dataset=examples(2),
        callbacks=[AttnRegCallback(regularizer)],
    )
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == regularizer.updates == 8
    assert "starts anew" not in caplog.text


def test_a_finished_comparison_is_not_repeated(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = shlex.split("--layers 1 --embed-dim 8 --ffn-dim 8 --heads 2 --epochs 2 --max-tokens 200 --warmup 10 --cpu")
    out = earlier / "compare"
    before = {name: (out / f"{name}-seed1" / "result.json").read_text() for name in ("plain", "ad_drop")}
    assert main(["compare", str(earlier / "corpus"), "--out", str(out), "--methods", "plain,ad_drop", *sizes]) == 0
    assert capsys.readouterr().out.count("(was done)") == 2
    assert before == {name: (out / f"{name}-seed1" / "result.json").read_text() for name in before}


def test_a_finished_fine_tuning_is_not_repeated_and_predicts(
    earlier: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["finetune", "rte", str(earlier / "rte"), "--out", str(earlier / "finetune"), "--methods", "ad_drop"]
    words += ["--model", str(earlier / "encoder"), "--epochs", "2", "--max-length", "30", "--cpu"]
    assert main(words) == 0
    assert "(was done)" in capsys.readouterr().out
    run = earlier / "finetune" / "ad_drop-seed1"
    assert json.loads((run / "result.json").read_text())["training"]["epochs"] == 2
    assert main(["predict", str(run), str(earlier / "rte" / "dev.tsv"), "--out", str(tmp_path / "rte.tsv")]) == 0
    assert len((tmp_path / "rte.tsv").read_text().splitlines()) == 22
