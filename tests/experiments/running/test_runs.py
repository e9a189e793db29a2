"""Folders of runs: their settings, what is refused, how commands fail, how they and fairseq-train's logs are read."""

import argparse
import fcntl
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
import torch

from attn_reg_plugin.experiments.comparison import digests_of_files
from attn_reg_plugin.experiments.report.examples import of_translations
from attn_reg_plugin.experiments.running import run as runs
from attn_reg_plugin.experiments.running.executor import RunError, at_a_time, execute
from attn_reg_plugin.experiments.running.flags import named, parsed, words_of
from attn_reg_plugin.experiments.running.run import read_run, read_runs
from attn_reg_plugin.experiments.running.training_log import TrainingLog, seconds_per_epoch
from attn_reg_plugin.experiments.translation import TranslationRun, read_hypotheses, score
from attn_reg_plugin.files import FolderInUse, lock_folder, write_json
from tests.experiments.starting import empty_corpus

TRAINING = {"epochs": 1, "best_epoch": 1, "seconds_per_epoch": None, "figures": {"loss": 1.0}}


def run_in(folder: Path, flags: str = "", method: str = "plain", **settings: Any) -> TranslationRun:
    found = parsed("--train-flags", flags)
    about = {"kind": "translation", "task": "en-ro", "data": "abc", "method": method, "seed": 1, "subsets": ["test"]}
    about |= {"generate": {"beam": 5}, "paths": {"data": "data/bin"}, "files": digests_of_files(found)}
    return TranslationRun(folder, {**about, "flags": found, **settings})


def begin(folder: Path) -> None:
    """As if the training had reached its first checkpoint."""
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "checkpoint_last.pt").touch()


def test_texts_become_flags_and_flags_words() -> None:
    text = "--lr=0.1 --adam-betas '(0.9, 0.98)' --fp16 -a small --lr 0.2 --langs en ro"
    found = parsed("--train-flags", text)
    assert found == {"lr": "0.2", "adam-betas": "(0.9, 0.98)", "fp16": True, "-a": "small", "langs": ["en", "ro"]}
    words = ["--lr", "0.2", "--adam-betas", "(0.9, 0.98)", "--fp16", "-a", "small", "--langs", "en", "ro"]
    assert words_of(found) == words
    assert words_of({"labels": "-LRB-,NN", "-a": "-b"}) == ["--labels=-LRB-,NN", "-a", "-b"]
    assert named(max_epoch=3, fp16=False, seed=None, lr=5e-05) == {"max-epoch": 3, "lr": 5e-05}
    for text, said in {
        "--x 'y": "a quote is not closed",
        "a\\": "it ends in a backslash",
        "x": "'x' follows no flag",
    }.items():
        with pytest.raises(ValueError, match=f"--train-flags .*: {said}"):
            parsed("--train-flags", text)


@pytest.mark.parametrize(
    "other",
    [
        "--lr 0.1 --attn-reg ad_drop --ad-drop-p 0.3",
        "--attn-reg ad_drop --ad-drop-p=0.3 --lr 0.1",
        "--lr 0.1 --attn-reg ad_drop --ad-drop-p 0.3 --attn-sites encoder.self",
        "--lr 0.2 --attn-reg ad_drop --ad-drop-p 0.7 --ad-drop-p 0.3 --lr 0.1",
    ],
)
def test_flags_that_mean_the_same_are_the_same_settings(tmp_path: Path, other: str) -> None:
    """Their order, a flag given twice and a method's defaults make no difference; nor does where data and run lie."""
    run_in(tmp_path / "a", "--lr 0.1 --attn-reg ad_drop --ad-drop-p 0.3").claim()
    folder = (tmp_path / "a").rename(tmp_path / "r")
    begin(folder)
    before = json.loads((folder / "run.json").read_text())
    generate = {"opus-mt-folder": "elsewhere/opus_mt", "beam": "5"}
    run_in(folder, other, title="another", paths={"data": "elsewhere/bin"}, generate=generate).claim()
    assert json.loads((folder / "run.json").read_text()) == {**before, "title": "another"}
    with pytest.raises(RunError, match=r"--ad-drop-q: 0\.3 there, 0\.4 asked for"):
        run_in(folder, f"{other} --ad-drop-q 0.4").claim()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"flags": "--lr 0.2 --fp16"}, r"--lr: 0\.1 there, 0\.2 asked for; --fp16: absent there, true asked for"),
        ({"flags": "--lr 0.1", "data": "xyz"}, "data: abc there, xyz asked for"),
        ({"flags": "--lr 0.1", "generate": {"beam": 4}}, "generate --beam: 5 there, 4 asked for"),
        ({"flags": "--lr 0.1", "seed": 2}, "seed: 1 there, 2 asked for"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, other: dict, said: str) -> None:
    run_in(tmp_path / "r", "--lr 0.1").claim()
    begin(tmp_path / "r")
    with pytest.raises(RunError, match=said) as caught:
        run_in(tmp_path / "r", **other).claim()
    assert "give another --out, or delete that folder" in str(caught.value)


def test_a_failed_start_gives_way_to_the_corrected_command(tmp_path: Path) -> None:
    """The failed start's log goes, so that no figure of it is taken for the new training's."""
    run_in(tmp_path / "r", "--lr 0.1 --nonsense").claim()
    (tmp_path / "r" / "checkpoints").mkdir()
    (tmp_path / "r" / "train.log").write_text("unrecognized arguments: --nonsense")
    corrected = run_in(tmp_path / "r", "--lr 0.1")
    with lock_folder(tmp_path / "r"), pytest.raises(FolderInUse, match=r"still working in .*r \(process \d+ on .*\)"):
        corrected.claim()
    corrected.claim()
    assert json.loads((tmp_path / "r" / "run.json").read_text()) == corrected.settings
    assert not (tmp_path / "r" / "train.log").exists()


@pytest.mark.parametrize("flag", ["--finetune-from-model", "--scheduled-dropout-schedule"])
def test_another_content_of_a_file_is_another_setting(tmp_path: Path, flag: str) -> None:
    """Wherever it lies; where it is gone, its path is compared."""
    start, folder = tmp_path / "base.pt", tmp_path / "r"
    start.write_text("a")
    run_in(folder, f"{flag} {start}").claim()
    begin(folder)
    start.write_text("longer")
    with pytest.raises(RunError, match=rf"{flag}: [0-9a-f]{{16}} there, [0-9a-f]{{16}} asked for"):
        run_in(folder, f"{flag} {start}").claim()
    start.write_text("a")
    moved = start.rename(tmp_path / "moved.pt")
    run_in(folder, f"{flag} {moved}").claim()
    run_in(folder, f"{flag} {start}").claim()
    with pytest.raises(RunError, match=rf"{flag}: .*base.pt there, .*gone.pt asked for"):
        run_in(folder, f"{flag} {tmp_path / 'gone.pt'}").claim()
    with pytest.raises(RunError, match=f"{flag}: .*base.pt there, absent asked for"):
        run_in(folder, "--lr 1").claim()


@pytest.mark.parametrize("name", ["run.json", "result.json"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON in UTF-8"),
        ("[1]", "holds no JSON object, but list"),
        ("\udcff", "is not JSON in UTF-8"),
        (None, "isn't a file, so no run wrote it"),
        ('{"training": {"epochs": 5}}', "lacks 'best_epoch' in 'training', so no run wrote it"),
    ],
    ids=["cut", "list", "bytes", "folder", "part"],
)
def test_files_of_a_run_that_are_none_are_named(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    begin(tmp_path)
    said = said if name == "result.json" or "lacks" not in said else "other settings"
    with pytest.raises(ValueError, match=said) as e:
        run_in(tmp_path).claim()
        run_in(tmp_path).carry_out(lambda log: None)
    assert str(tmp_path) in str(e.value) and str(e.value).endswith("; give another --out, or delete that folder")
    assert content is None or (tmp_path / name).read_bytes() == content.encode(errors="surrogateescape")


def test_a_run_is_finished_when_trained_and_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "execute", lambda *_, **__: pytest.fail("a finished run starts no command"))
    run = run_in(tmp_path)
    assert not run.finished()
    write_json(tmp_path / "result.json", {"training": TRAINING})
    assert not run.finished() and replace(run, measured=False).finished(), "of a trial no test set is looked at"
    write_json(tmp_path / "result.json", {"training": TRAINING, "scores": {}})
    assert run.finished()
    run.carry_out(lambda log: None)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_training_that_ended_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Patience may have ended it: killed before its result is written, it would train on."""
    (tmp_path / "checkpoints").mkdir()
    for name in ("last", "best"):
        (tmp_path / "checkpoints" / f"checkpoint_{name}.pt").touch()
    records = [{"epoch": 1, "valid_loss": "0.5", "valid_num_updates": 7}, {"epoch": 1, "train_train_wall": "3"}]
    lines = [*map(json.dumps, records), "INFO:fairseq_cli.train:done training in 9.5 seconds"]
    lines += [json.dumps({"epoch": 2, "update": 1.5})] * interrupted
    (tmp_path / "train.log").write_text("".join(f"x | {line}\n" for line in lines), encoding="utf-8")
    started = []
    monkeypatch.setattr(runs, "execute", lambda command, *rest: started.append(command))
    run = replace(run_in(tmp_path), measured=False)
    run.carry_out(lambda log: None)
    assert run.result()["training"]["figures"]["loss"] == 0.5 and len(started) == interrupted


def test_chinese_has_words() -> None:
    scores, (signature, _) = score(["我们 去学校。"], ["我们去学校。"], "zh")
    assert scores["bleu"] == pytest.approx(100) and "tok:zh" in signature
    sentence = of_translations(["我们 去学校。"], ["我们去学校。"], "zh")["bleu"]
    assert sentence.scores(np.ones((1, 1))).tolist() == [pytest.approx(100)]


def test_every_test_set_is_translated_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = empty_corpus(tmp_path / "data")
    for subset in ("test", "test1"):
        (data / "raw" / f"{subset}.ro").write_text("test x y z\nb c d e\n")

    def translate(command: list[str], path: Path, *_: object) -> None:
        folder = Path(command[command.index("--results-path") + 1])
        folder.mkdir(exist_ok=True)
        subset = command[command.index("--gen-subset") + 1]
        second = "b c d e" if subset == "test" else "test1 x y z"
        (folder / f"generate-{subset}.txt").write_text(f"D-1\t0\t{second}\nD-0\t0\t{subset} x y z\n", "utf-8")

    monkeypatch.setattr(runs, "execute", translate)
    where = {"subsets": ["test", "test1"], "paths": {"data": f"{data}/bin"}}
    run = run_in(tmp_path / "r", "--source-lang en --target-lang ro", **where)
    run.claim()
    (run.folder / "train.log").write_text(json.dumps({"epoch": 1, "valid_num_updates": "3", "valid_loss": "2.5"}))
    found = run.measure(0)
    assert found["scores"]["test"] == {"bleu": pytest.approx(100), "chrf": pytest.approx(100)}
    assert found["scores"]["test1"]["bleu"] < 90 and found["scores"]["test1"]["chrf"] < 90
    assert "tok:13a" in found["signatures"][0] and "nc:6" in found["signatures"][1]
    assert found["scores"]["valid"] == {"loss": 2.5} and found["constant"] == ["test1"], "one sentence for all"
    texts = {path.name: path.read_text() for path in (run.folder / "translations").glob("test1.*")}
    assert texts == {"test1.ro": "test1 x y z\n" * 2, "test1.references.ro": "test x y z\nb c d e\n"}


OUTPUT = (
    "2026-01-01 00:00:00 | INFO | fairseq_cli.generate | loading model(s)\n"
    "S-2\tthe rain\nT-2\tploaia\nH-2\t-0.5\t▁ploa ia\nD-2\t-0.5\tploaia\nP-2\t-0.1 -0.9\n"
    "H-0\t-inf\t\nD-0\t-inf\t\nP-0\t-inf\n"
    "D-1\t-0.2\ta\u2028b c\nD-1\t-0.9\tsecond best\n"
    "Generate test with beam=5: BLEU4 = 0.00\n"
)


def test_hypotheses_come_in_the_order_of_the_corpus(tmp_path: Path) -> None:
    """Ids out of order, an empty translation, a line separator within one, an n-best list; all, and no more."""
    path = tmp_path / "generate-test.txt"
    path.write_text(OUTPUT, encoding="utf-8", newline="\n")
    assert read_hypotheses(path, 3) == ["", "a\u2028b c", "ploaia"]
    with pytest.raises(ValueError, match=r"holds 3 translations of 5; the first missing is 3"):
        read_hypotheses(path, 5)
    with pytest.raises(ValueError, match=r"holds 3 translations, but there are 2 references"):
        read_hypotheses(path, 2)


def _execute(folder: Path, code: str, seen: list[float], **how: Any) -> None:
    with lock_folder(folder) as lock:
        watch = lambda log: seen.append(log.position)  # noqa: E731
        execute([sys.executable, "-c", code], folder / "log", "training of x", lock, watch, **how)


def test_a_failing_command_gives_its_last_lines(tmp_path: Path) -> None:
    code = "import sys; [print(f'line {n}') for n in range(50)]; print('the reason', file=sys.stderr); sys.exit(3)"
    with pytest.raises(RunError, match="the training of x ended with exit status 3; its log is") as caught:
        _execute(tmp_path, code, [])
    assert "the reason" in caught.value.tail and "line 49" in caught.value.tail and "line 5\n" not in caught.value.tail


def test_a_growing_log_is_followed_and_kept(tmp_path: Path) -> None:
    """The lines of an earlier process stay in the file, and are not taken for the position of this one."""
    (tmp_path / "log").write_text('old {"epoch": 9, "update": 8.5}\n', encoding="utf-8")
    seen: list[float] = []
    _execute(tmp_path, "print('no record')", seen)
    assert seen[-1] == 0
    _execute(tmp_path, """print('new {"epoch": 1, "update": 0.5}')""", seen)
    assert seen[-1] == 0.5 and (tmp_path / "log").read_text(encoding="utf-8").startswith("old")


def test_an_interruption_and_a_stop_end_the_command(tmp_path: Path) -> None:
    """After which it holds the lock no longer."""

    def interrupt(log: TrainingLog) -> None:
        raise KeyboardInterrupt

    sleeping = "import os, time; print(os.environ['OMP_NUM_THREADS'], flush=True); time.sleep(60)"
    with lock_folder(tmp_path) as lock, pytest.raises(KeyboardInterrupt):
        execute([sys.executable, "-c", sleeping], tmp_path / "log", "x", lock, interrupt, threads=3)
    stop = Event()
    threading.Timer(1.0, stop.set).start()
    with pytest.raises(RunError, match="the training of x was stopped; the same command continues it"):
        _execute(tmp_path, sleeping, [], stop=stop, threads=3)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "3\n3\n"
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FolderInUse, match="another process is still working in"):
            run_in(tmp_path).carry_out(lambda log: None)


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_task_is_called_and_no_more_than_jobs_at_a_time(jobs: int) -> None:
    running, most, done = [], [], []
    together = Barrier(min(jobs, 4))

    def work(number: int) -> None:
        running.append(number)
        most.append(len(running))
        together.wait(10)
        time.sleep(0.02)
        running.remove(number)
        done.append(number)

    at_a_time([lambda stop, number=number: work(number) for number in range(4)], jobs)
    assert sorted(done) == [0, 1, 2, 3] and max(most) == min(jobs, 4)


def test_the_first_failure_stops_the_others_and_is_raised() -> None:
    stopped, late = [], []

    def fail(stop: Event) -> None:
        raise ValueError("the reason")

    def wait(stop: Event) -> None:
        stopped.append(stop.wait(10))
        raise RuntimeError("stopped")

    with pytest.raises(ValueError, match="the reason"):
        at_a_time([wait, fail, lambda stop: late.append(stop.wait(0.2))], 2)
    assert stopped == [True] and late == []


def test_runs_are_read_from_their_folders(tmp_path: Path) -> None:
    for method, seed, accuracy in (("plain", 1, 60.0), ("plain", 2, 62.0), ("ad_drop", 1, 65.0)):
        run = run_in(tmp_path / "out" / f"{method}-seed{seed}", "--lr 0.1", method, seed=seed)
        run.claim()
        scores = {"valid": {"accuracy": accuracy}}
        write_json(run.folder / "result.json", {"training": TRAINING, "scores": scores})
    found = read_runs(tmp_path / "out")
    names = [(one.method, one.title, one.seed) for one in found]
    assert names == [("ad_drop", "ad_drop", 1), ("plain", "plain", 1), ("plain", "plain", 2)]
    assert [one.scores["valid"]["accuracy"] for one in found] == [65.0, 60.0, 62.0]
    assert found[0].metric == ("loss", False) and found[0].log().history().empty
    lines = [{"epoch": 1, "valid_num_updates": "3", "valid_loss": "2.5"}, {"epoch": 1, "train_train_wall": "3"}]
    (found[0].folder / "train.log").write_text("\n".join(map(json.dumps, lines)))
    assert found[0].log().history().loc[1, "valid_loss"] == 2.5
    write_json(tmp_path / "run.json", {"task": "x"})
    with pytest.raises(ValueError, match=r"holds no run: its run\.json has no 'flags'"):
        read_run(tmp_path)


def _valid(epoch: int, updates: int, **figures: object) -> str:
    record = {"epoch": epoch, "valid_num_updates": str(updates)}
    record |= {f"valid_{name}": str(value) for name, value in figures.items()}
    return f"2026-01-01 00:00:00 | INFO | valid | {json.dumps(record)}"


def _train(epoch: int, wall: object) -> str:
    return f"x | INFO | train | {json.dumps({'epoch': epoch, 'train_train_wall': str(wall), 'train_wall': '99'})}"


def _log(*lines: str) -> TrainingLog:
    log = TrainingLog()
    for line in lines:
        log.add(line)
    return log


def test_the_best_validation_is_the_lowest_nll_loss() -> None:
    log = _log(
        _valid(1, 10, loss=5.0, nll_loss=4.5),
        _valid(2, 20, loss=4.0, nll_loss=3.6),
        _valid(3, 30, loss=3.9, nll_loss=3.7),
        _valid(4, 40, loss="nan", nll_loss="nan"),
    )
    assert log.best_validation() == ("nll_loss", 3.6)
    assert _log(_valid(1, 10, loss=5.0), _valid(2, 20, loss=5.5)).best_validation() == ("loss", 5.0)
    with pytest.raises(ValueError, match="no validation loss"):
        _log(_train(1, 3), _valid(1, 10, loss="inf")).best_validation()


def test_the_chosen_epoch_is_that_of_fairseqs_best_checkpoint() -> None:
    """By smoothed loss or BLEU it is another than the one with the lowest nll_loss; of equals the later one."""
    log = _log(
        _valid(1, 10, loss=4.0, nll_loss=3.5, bleu=7.0),
        _valid(2, 20, loss=3.9, nll_loss=3.6, bleu=9.0),
        _valid(3, 30, loss=3.9, nll_loss=3.7, bleu=8.0),
    )
    assert [log.chosen(*one)[0] for one in (("nll_loss", False), ("loss", False), ("bleu", True))] == [1, 3, 2]
    with pytest.raises(ValueError, match='no validation with "chrf"'):
        log.chosen("chrf", True)


def test_a_better_validation_without_a_checkpoint_is_not_chosen(tmp_path: Path) -> None:
    """`--validate-interval-updates 10` and a checkpoint at the end of epochs only."""
    log = _log(*(_valid(1 + (n > 2), 10 * n, accuracy=score) for n, score in enumerate([70, 60, 80, 65], start=1)))
    best = tmp_path / "checkpoint_best.pt"
    torch.save({"optimizer_history": [{"num_updates": 1}, {"num_updates": 40}]}, best)
    assert log.chosen("accuracy", True, best) == (2, {"num_updates": 40, "accuracy": 65})
    torch.save({"model": {}}, best)
    assert log.chosen("accuracy", True, best)[1]["accuracy"] == 80
    assert log.chosen("accuracy", True, tmp_path / "gone.pt")[1]["accuracy"] == 80


def test_repeated_lines_count_once_and_the_last_holds() -> None:
    """A resumed run repeats an epoch."""
    log = _log(_train(1, 4), _train(2, 9), _train(2, 5), _valid(1, 10, loss=3), _valid(1, 10, loss=4))
    assert {epoch: figures["train_wall"] for epoch, figures in log.trainings.items()} == {1: 4.0, 2: 5.0}
    assert log.best_validation() == ("loss", 4.0)
    log.add('x | INFO | train_inner | {"epoch": 2, "update": 1.25, "loss": "4"}')
    assert log.position == 1.25


def test_other_lines_are_ignored() -> None:
    log = _log(
        "{'_name': None, 'common': {'no_progress_bar': False}}",
        "a line cut short {",
        '{"valid_num_updates": "3"}',
        "[1, 2]",
        "",
    )
    assert log == TrainingLog()


def test_the_time_comes_unrounded_from_the_checkpoint_else_from_the_log(tmp_path: Path) -> None:
    log, checkpoint = _log(_train(1, 2), _train(2, 3)), tmp_path / "last.pt"
    assert seconds_per_epoch(TrainingLog(), checkpoint) is None
    for meters, seconds in ((None, 2.5), ([], 2.5), ([(800, "train_wall", "StopwatchMeter", {"sum": 4.9})], 2.45)):
        if meters is not None:
            torch.save({"args": argparse.Namespace(), "extra_state": {"metrics": {"default": meters}}}, checkpoint)
        assert seconds_per_epoch(log, checkpoint) == pytest.approx(seconds)
