"""What a run of `attn-reg finetune` is known by: its data, its model, its updates, what it attributes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

from attn_reg_plugin.experiments import fine_tuning
from attn_reg_plugin.experiments.labelled_runs import LabelledData, LabelledRun
from attn_reg_plugin.experiments.methods import Method
from attn_reg_plugin.labelled import find_task
from tests.commands.test_finetune import parsed, planned
from tests.models.hf_folders import make_encoder, make_rte

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_is_of_its_data_and_its_model(rte: list[str], tmp_path: Path) -> None:
    before = planned(*rte)[0].settings()
    assert planned(*rte)[0].settings() == before
    with (tmp_path / "data" / "dev.tsv").open("a", encoding="utf-8") as file:
        file.write("21\tw1\tw2\tentailment\n")
    changed = planned(*rte)[0].settings()
    make_encoder(tmp_path / "encoder", seed=2)
    again = planned(*rte)[0].settings()
    assert before["data"] != changed["data"] == again["data"] and before["model"] == changed["model"] != again["model"]
    (tmp_path / "encoder" / "vocab.txt").write_text("other\n", encoding="utf-8")
    assert planned(*rte)[0].settings()["tokenizer"] != again.get("tokenizer")


def test_a_run_is_of_its_further_validation_set(tmp_path: Path) -> None:
    data = LabelledData(str(tmp_path), find_task("mnli"))
    for name in ("train", "dev_matched"):
        (tmp_path / f"{name}.tsv").write_text("x\n")
    digests = [data.digest_of_further()]
    for text in ("a\n", "b\n"):
        (tmp_path / "dev_mismatched.tsv").write_text(text)
        digests.append(data.digest_of_further())
    assert digests[0] == "" and len(set(digests)) == 3


def test_a_run_is_of_its_documents_labels(tmp_path: Path) -> None:
    """In a folder of documents their names say these."""
    for part in ("train", "test"):
        for name in ("neg/0.txt", "neg/1.txt", "pos/2.txt"):
            (tmp_path / part / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / part / name).write_text(f"text {name}\n")
    data = LabelledData(str(tmp_path), find_task("imdb"))
    before = data.digest()
    (tmp_path / "train" / "neg" / "1.txt").rename(tmp_path / "train" / "pos" / "1.txt")
    assert data.digest() != before


def test_the_notes_say_how_many_examples_there_were(rte: list[str]) -> None:
    settings = parsed(*rte, "--train-examples", "60")
    assert settings.part_notes(48) == ["trained on all 48 examples; 60 were asked for"]
    assert settings.part_notes(61) == settings.part_notes() == ["trained on 60 examples, drawn at random"]
    assert parsed(*rte).part_notes(48) == []


def test_batches_are_counted_once_for_all_seeds(rte: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(fine_tuning, "updates_of", lambda one: asked.append(one.method.name) or 7)
    runs = planned(*rte, "--seeds", "1,2", "--", "--max-tokens", "40", methods="plain,ad_drop")
    assert asked == ["plain", "ad_drop"] and len(runs) == 4
    assert all("--total-num-update 7" in " ".join(run.train_flags) for run in runs)


def test_updates_are_counted_with_the_flags_that_change_them(rte: list[str]) -> None:
    """Of 48 examples in batches of 16, 10 epochs."""

    def updates(*words: str, methods: str = "plain") -> str:
        flags = list(planned(*rte, *words, methods=methods)[0].train_flags)
        return flags[flags.index("--total-num-update") + 1]

    assert updates() == "30" and updates("--", "--update-freq", "2") == "20"
    assert updates("--", "--max-sentences=8", "--max-epoch", "3") == "18" and updates("--", "--max-update", "7") == "7"
    assert updates("--", "--max-epoch", "0", "--max-update", "70") == "70"
    assert updates("--max-length", "40", "--", "--skip-remainder-batch") == "20", (
        "fairseq leaves out the last batch of an epoch"
    )
    fives = ("--max-length", "5", "--", "--max-tokens", "20")  # four of these inputs
    assert updates(*fives) == updates(*fives, "--batch-size=64") == "120"
    assert updates(*fives, "--max-epoch", "0", "--max-update", "70") == "70"
    for wrong in (["--update-freq", "2,2"], ["--batch-size", "0"], ["--max-epoch", "0"]):
        with pytest.raises(ValueError, match=f"^{wrong[0]} is '?{wrong[1]}"):
            updates("--", *wrong)


def test_a_folder_that_fairseq_splits_is_refused(rte: list[str], tmp_path: Path) -> None:
    (tmp_path / "data").rename(tmp_path / "da:ta")
    with pytest.raises(ValueError, match=r"^DATA .*da:ta has ':', at which fairseq splits paths; give another folder$"):
        planned(*(word.replace(str(tmp_path / "data"), str(tmp_path / "da:ta")) for word in rte))


def test_a_run_is_of_the_schedule_in_its_file(rte: list[str], tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("drop encoder.self: {0: 0.5, 100: 0.1}")
    words = ["--", "--scheduled-dropout-schedule", str(tmp_path / "s.yaml")]
    plain, scheduled = planned(*rte, *words, methods="plain,scheduled_dropout")
    assert scheduled.settings()["schedule"] == "drop encoder.self: {0: 0.5, 100: 0.1}"
    assert "schedule" not in plain.settings(), "which takes no notice of it"


def test_a_regression_attributed_otherwise_is_another_run(tmp_path: Path) -> None:
    def settings(task: str, *flags: str) -> dict[str, Any]:
        data = LabelledData(
            str(make_rte(tmp_path / task)), dataclasses.replace(find_task("rte"), kind=find_task(task).kind)
        )
        method = Method("x", "x", ())
        return LabelledRun(method, 1, tmp_path, data, ("--attn-reg", *flags), (), model="m").settings()

    assert settings("stsb", "ad_drop")["attributed"] == "prediction"
    for task, flags in (
        ("rte", ["ad_drop"]),
        ("stsb", ["none"]),
        ("stsb", ["ad_drop", "--ad-drop-labels", "gold"]),
        ("stsb", ["ad_drop", "--ad-drop-probe", "kept"]),
        ("stsb", ["ad_drop", "--ad-drop-attribution", "random"]),
    ):
        assert "attributed" not in settings(task, *flags)
