"""`attn-reg compare`: its arguments, and a whole comparison on a toy corpus."""

import json
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from attn_reg_plugin.cli import _parsed, main
from attn_reg_plugin.experiments import steps
from attn_reg_plugin.experiments.methods import select_methods
from attn_reg_plugin.experiments.running import run as runs
from attn_reg_plugin.experiments.running.checks import check_runs
from attn_reg_plugin.experiments.translation import TranslationComparison
from attn_reg_plugin.files import raw_lines
from tests.experiments.starting import empty_corpus, task_of
from tests.tasks.fairseq_runs import make_corpus

SIZE_FLAGS = {"layers": 1, "embed-dim": 16, "ffn-dim": 32, "heads": 2, "epochs": 2, "max-tokens": 200, "warmup": 10}
SMALL = [*(word for name, value in SIZE_FLAGS.items() for word in (f"--{name}", str(value))), "--cpu"]

SIZES = {"train": 100, "valid": 20, "test": 20}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "data", sizes=SIZES, mark="▁").parent


def parsed(*words: str) -> TranslationComparison:
    return steps.from_arguments(TranslationComparison, _parsed("compare", words))


def test_flags_after_the_dashes_go_to_fairseq() -> None:
    settings = parsed("--out", "runs", "data", "--lr", "0.1", "--", "--lr", "0.2", "--fp16")
    assert settings.lr == 0.1 and settings.own_flags == {"lr": "0.2", "fp16": True}
    assert (settings.data, settings.out) == (Path("data"), Path("runs"))
    assert parsed("data", "--out", "runs").own_flags == {}
    assert parsed("data", "--out", "runs", "--seeds", "3, 1").seeds == (3, 1)


def planned(corpus: Path, *words: str, methods: str = "plain") -> list[runs.Run]:
    return parsed(str(corpus), "--out", str(corpus / "out"), *SMALL, *words).plan(select_methods(methods))


LINEAR = ["--lr-scheduler", "linear", "--batch-size"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*LINEAR, "16"], "polynomial_decay --warmup-updates 10 --total-num-update 14 "),
        ([*LINEAR, "16", "--", "--max-update", "12"], "--total-num-update 12 "),
        ([*LINEAR, "16", "--", "--update-freq", "1,2"], "--total-num-update 11 "),
        # sorted, the sentences of 3 to 9 tokens make 11 batches of at most 60
        (["--lr-scheduler", "cosine", "--max-tokens", "60"], "cosine --warmup-updates 10 --lr-period-updates 12 "),
        (["--lr-scheduler", "fixed"], "--lr-scheduler fixed --warmup-updates 10 --max-tokens"),
        (["--metric", "bleu"], "--eval-bleu --eval-bleu-args .*--best-checkpoint-metric bleu --maximize"),
        (["--train-examples", "30"], "--train-examples 30 --cpu"),
        (
            ["--train-fraction", "0.25", *LINEAR, "4"],
            "--total-num-update 14 .*--train-fraction 0.25 --train-sample-seed 2 ",
        ),
    ],
)
def test_settings_become_flags_that_fairseq_takes(words: list[str], said: str, corpus: Path) -> None:
    (run,) = planned(corpus, "--seeds", "2", *words)
    assert re.search(said, " ".join(run.train_command()))
    check_runs([run])


def test_a_warm_up_as_long_as_the_training_is_refused(corpus: Path) -> None:
    with pytest.raises(ValueError, match="warmup is 10, but must be below the 2 updates of the training, with which"):
        planned(corpus, "--lr-scheduler", "linear", "--max-tokens", "4000")
    linear = [*LINEAR, "16", "--"]
    with pytest.raises(ValueError, match="warmup is 10, but must be below the 9 updates of the training, with which"):
        planned(corpus, *linear, "--max-update", "9")
    start = corpus.parent / "start.pt"
    start.touch()
    (untuned,) = planned(corpus, *linear, "--finetune-from-model", str(start), methods="untuned")
    assert untuned.flags["total-num-update"] == 14, "its single update is no length of a training"
    assert (untuned.flags["lr"], untuned.flags["max-update"]) == (0, 1)


def test_every_seed_trains_on_pairs_of_its_own(corpus: Path) -> None:
    """As fairseq-train reads them, whenever it does: a quarter, the same for every method, and in batches."""
    whole = task_of(planned(corpus)[0])
    whole.load_dataset("train")
    pairs = [(row["source"].tolist(), row["target"].tolist()) for row in whole.dataset("train")]
    found = []
    for run in planned(corpus, "--seeds", "1,2", "--train-fraction", "0.25", methods="plain,ad_drop"):
        task = task_of(run)
        for _ in range(2):  # as a training that goes on does
            task.load_dataset("train")
            dataset = task.dataset("train")
            drawn = [(row["source"].tolist(), row["target"].tolist()) for row in dataset]
            assert len(drawn) == 25 and [len(row[0]) for row in drawn] == dataset.src_sizes.tolist()
            places = [pairs.index(pair) for pair in drawn]
            assert places == sorted(places), "in their order"
            found.append(drawn)
        iterator = task.get_batch_iterator(dataset, max_tokens=60, max_positions=task.max_positions())
        rows = [ids for batch in iterator.next_epoch_itr() for ids in batch["net_input"]["src_tokens"].tolist()]
        assert sorted([one for one in ids if one != 1] for ids in rows) == sorted(row[0] for row in drawn)
        task.load_dataset("valid")
        assert len(task.dataset("valid")) == SIZES["valid"]
    assert found[0] == found[1] == found[2] == found[3] != found[4] == found[5] == found[6] == found[7]
    (fixed,), (other,) = (planned(corpus, "--seeds", seed, "--train-examples", "9") for seed in "12")
    assert fixed.flags == other.flags, "so many are the same for every seed"
    shutil.copytree(corpus / "bin", corpus / "second", ignore=shutil.ignore_patterns("dict.*"))
    task.cfg.data = f"{corpus / 'bin'}:{corpus / 'second'}"
    task.load_dataset("train", epoch=2)  # the dictionaries are in the first folder only


def test_pieces_that_would_not_be_joined_are_refused(tmp_path: Path) -> None:
    """sentencepiece's way of joining takes the spaces out of other pieces, and BLEU is 0."""
    dictionary = empty_corpus(tmp_path / "data") / "bin" / "dict.ro.txt"
    dictionary.write_text("pi@@ 3\nsica 2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{dictionary} has none of sentencepiece's pieces"):
        planned(tmp_path / "data")
    (run,) = planned(tmp_path / "data", "--generate-flags=--post-process subword_nmt --sampling --seed 3")
    assert run.settings["generate"]["seed"] == "3", "the setting seeds is about trainings"
    assert run.settings["generate"]["post-process"] == "subword_nmt"
    (chosen,) = planned(tmp_path / "data", "--metric", "bleu", "--generate-flags=--remove-bpe")
    assert chosen.flags["eval-bleu-remove-bpe"] == "subword_nmt", "checkpoints are chosen by words, too"


@pytest.mark.parametrize(
    ("target", "words", "said"),
    [
        ("ja", [], r"Japanese .* pip install sacrebleu\[ja\]"),
        ("zh", ["--metric", "bleu"], "--metric bleu: fairseq's own BLEU has no words of zh"),
        (
            "ro",
            ["--opus-mt", "model"],
            r"data was prepared without --opus-mt model: its opus_mt/vocab\.json is missing",
        ),
    ],
)
def test_what_a_language_or_a_model_needs_is_said(
    target: str, words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "MeCab", None)
    for path in sorted(empty_corpus(Path("data")).rglob("*ro*")):
        path.rename(path.with_name(path.name.replace("ro", target)))
    Path("model").mkdir()
    for name, text in (("fairseq.flags", ""), ("vocab.json", "{}")):
        Path("model", name).write_text(text)
    with pytest.raises(ValueError, match=said):
        planned(Path("data"), *words)


def test_references_are_counted_before_anything_is_trained(corpus: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    with (data / "raw" / "test.ro").open("a", encoding="utf-8") as file:
        file.write("one more\n")
    said = r"raw/test\.ro has (\d+) references, but .*bin has (\d+) sentences of test"
    with pytest.raises(ValueError, match=said) as refused:
        planned(data)
    more, there = map(int, re.search(said, str(refused.value)).groups())
    assert more == there + 1


def test_lines_are_split_at_newlines_only(tmp_path: Path) -> None:
    """sacrebleu and fairseq count lines so; `splitlines` would give more."""
    path = tmp_path / "text"
    texts = {"a\u2028b\n\nc\x0bd\n": ["a\u2028b", "", "c\x0bd"], "a\n\n": ["a", ""], "": []}
    for text, lines in texts.items():
        path.write_text(text, encoding="utf-8", newline="\n")
        assert raw_lines(path) == lines


SPLITS = "has ':', at which fairseq splits paths; give"


@pytest.mark.parametrize(
    ("data", "out", "missing", "said"),
    [
        ("data", "my:runs", "", f"--out my:runs {SPLITS}"),
        ("da:ta", "runs", "", f"DATA da:ta {SPLITS}"),
        ("data", "runs", "bin", "has no folder bin/"),
        ("data", "runs", "bin/train.en-ro.en.idx bin/train.en-ro.ro.idx", "has no training data"),
        ("data", "runs", "bin/test.en-ro.en.idx bin/test1.en-ro.en.idx", "has no test data"),
        ("data", "runs", "", "bin/test1.en-ro.en.idx is damaged, or is not an index"),
        ("data", "runs", "", "bin/train.en-ro.ro.idx is damaged, or is not an index"),
        ("data", "runs", "+bin/train.de-en.en.idx", "bin has data of de-en and en-ro; give a folder with one pair"),
        ("data", "runs", "raw/test1.ro", "raw/test1.ro is missing; make it with `attn-reg prepare`"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    data: str,
    out: str,
    missing: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    empty_corpus(Path(data))
    for name in missing.split():
        if name.startswith("+"):
            (Path(data) / name[1:]).write_text("a line\n")
        else:
            (Path(data) / name).rename(tmp_path / Path(name).name)
    if "damaged" in said:
        (Path(data) / said.split()[0]).write_bytes(b"garbage")
    assert main(["compare", data, "--out", out]) == 2
    assert said in capsys.readouterr().err
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(([f"--seeds={text}"], "--seeds wants distinct whole numbers") for text in ("", "1,1", "1,-2")),
        (["--", "--nonsense"], "plain: unrecognized arguments: --nonsense"),
        (["--", "--restore-file", "x.pt"], "--train-flags has --restore-file, which the setting finetune-from"),
        (["--", "--task", "translation"], "--train-flags has --task, which the command decides; leave it out"),
        (
            ["--metric", "bleu", "--", "--best-checkpoint-metric=loss"],
            "--train-flags has --best-checkpoint-metric, which the setting metric decides; give that",
        ),
        (["--", "--attn-reg", "nope"], "--train-flags has --attn-reg, which the setting methods decides; give that"),
        (["--", "--user-dir", "gone"], "--train-flags: --user-dir is gone, but there is no such folder"),
        (["--", "--log-format", "simple"], "--train-flags has --log-format, which the command decides; leave it out"),
        (["--", "-s", "ro"], "--train-flags has -s, which the setting data decides; give that"),
        (["--generate-flags=--path x.pt"], "--generate-flags has --path, which the command decides; leave it out"),
        (["--generate-flags=-t en"], "--generate-flags has -t, which the setting data decides; give that"),
        (["--train-examples", "101"], "--train-examples is 101, but there are 100 training examples"),
        (["--train-fraction", "0.004"], "--train-fraction 0.004 of 100 training examples is none"),
        (["--arch", "nothing"], "plain: argument --arch/-a: invalid choice: 'nothing'"),
        (["--generate-flags=--nonsense"], "plain: unrecognized arguments: --nonsense"),
        (["--method-flags", "ad_drop=--ad-drop-p 2"], "ad_drop: --attn-reg ad_drop: p is 2.0"),
        (["--method-flags", "ad_drop=--attn-sites encoder.self[7]"], "ad_drop: --attn-sites 'encoder.self[7]'"),
        (
            ["--method-flags", "ad_drop=--attn-reg scheduled_dropout --scheduled-dropout-schedule gone.txt"],
            "ad_drop: --scheduled-dropout-schedule: the schedule file gone.txt cannot be read",
        ),
        (
            ["--", "--finetune-from-model", "gone.pt"],
            "plain: --finetune-from-model is gone.pt, but there is no such file",
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_written(
    words: list[str], said: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(corpus), "--out", str(tmp_path / "runs"), *SMALL, *words]) == 2
    captured = capsys.readouterr()
    assert f"attn-reg compare: {said}" in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_comparison_from_end_to_end(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs"
    line = ["compare", str(corpus), "--out", str(out), "--methods", "plain,own_attention_dropout", *SMALL]
    line += ["--jobs", "2", "--metric", "bleu", "--generate-flags", "--max-len-b 5", "--", "--lr", "0.01"]
    with monkeypatch.context() as patch:
        patch.setattr(runs, "execute", mock.Mock(side_effect=KeyboardInterrupt))
        assert main(line) == 130 and "the same command goes on" in capsys.readouterr().out
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "own_attention_dropout" in printed and "tok:13a" in printed and f"table: {out / 'results.md'}" in printed
    assert "the same command goes on where it ended" in printed, "resuming is said at the start"
    content = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in content["methods"]] == ["plain", "own_attention_dropout"]
    assert content["methods"][0]["relative_time"] == 1.0
    plain, other = (content["runs"][f"{name}-seed1"] for name in ("plain", "own_attention_dropout"))
    assert plain["training"]["epochs"] == 2 and plain["training"]["seconds_per_epoch"] > 0
    assert plain["flags"]["dropout"] == 0.3
    assert plain["scores"]["valid"]["nll_loss"] != other["scores"]["valid"]["nll_loss"], "the flags had no effect"
    table = (out / "results.md").read_text(encoding="utf-8")
    assert "| own_attention_dropout |" in table and "checkpoints chosen by the best bleu" in table
    assert set(content["methods"][1]["differences"]["test"]) == {"bleu", "chrf"}
    log = (out / "plain-seed1" / "train.log").read_text(encoding="utf-8")
    assert '"valid_bleu"' in log and "best_checkpoint_metric': 'bleu'" in log
    folder = out / "plain-seed1"
    translations = (folder / "translations" / "test.ro").read_text(encoding="utf-8")
    assert translations.count("\n") == SIZES["test"], "not a multiple of 8, and none is lost"
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"checkpoint_best.pt", "checkpoint_last.pt"}

    monkeypatch.setattr(runs, "execute", lambda *_, **__: pytest.fail("a finished run was run again"))
    assert main(line) == 0
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == content
    capsys.readouterr()
    assert main([*line[:-1], "0.02"]) == 2
    assert "--lr: 0.01 there, 0.02 asked for" in capsys.readouterr().err
