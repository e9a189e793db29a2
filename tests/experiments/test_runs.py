"""Folders of runs: their settings, what is refused, how commands fail."""

from __future__ import annotations

import fcntl
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from attn_reg_plugin.experiments import runs_before as runs
from attn_reg_plugin.experiments.executing_before import RunError
from attn_reg_plugin.experiments.methods import TASK, Method, known_methods, select_methods
from attn_reg_plugin.experiments.runs_before import Run
from attn_reg_plugin.experiments.training_log import TrainingLog
from attn_reg_plugin.files import lock_folder, write_json

TRAINING = {"epochs": 1, "best_valid_loss": 1.0, "loss": "loss", "best_epoch": 1, "seconds_per_epoch": None}


class Data(SimpleNamespace):
    """Stands for a DataFolder."""

    def digest(self) -> str:
        return self.content

    def digest_of_references(self) -> str:
        return f"references of {self.content}"


def run_in(folder: Path, *flags: str, seed: int = 1, content: str = "abc") -> Run:
    data = Data(content=content, bin=Path("data/bin"), source="en", target="ro", subsets=("test",))
    (method,) = select_methods(["plain"])
    return Run(method, seed, folder, data, tuple(flags), ("--beam", "5"))  # type: ignore[arg-type]


def begin(folder: Path) -> None:
    """As if the training had reached its first checkpoint."""
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "checkpoint_last.pt").touch()


def test_the_same_settings_may_go_on(tmp_path: Path) -> None:
    run_in(tmp_path / "r", "--lr", "0.1").claim()
    before = {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()}
    run_in(tmp_path / "r", "--lr", "0.1").claim()
    assert before and before == {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()}


@pytest.mark.parametrize(
    "other",
    [
        "--attn-reg ad_drop --lr 0.1",
        "--lr 0.1 --attn-reg ad_drop --ad-drop-p 0.3 --attn-sites encoder.self",
        "--lr 0.2 --attn-reg ad_drop --ad-drop-p 0.7 --ad-drop-p 0.3 --lr 0.1",
    ],
)
def test_flags_that_mean_the_same_are_the_same_settings(tmp_path: Path, other: str) -> None:
    """Their order, a flag given twice and a method's defaults make no difference."""
    run_in(tmp_path / "r", "--lr", "0.1", "--attn-reg", "ad_drop", "--ad-drop-p", "0.3").claim()
    begin(tmp_path / "r")
    run_in(tmp_path / "r", *other.split()).claim()
    with pytest.raises(RunError, match=r"--ad-drop-q: 0\.3 there, 0\.4 asked for"):
        run_in(tmp_path / "r", *other.split(), "--ad-drop-q", "0.4").claim()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"flags": ["--lr", "0.2", "--fp16"]}, r"--lr: 0\.1 there, 0\.2 asked for; --fp16: absent there, given"),
        ({"flags": ["--lr", "0.1"], "content": "xyz"}, "data: abc there, xyz asked for"),
        ({"flags": ["--lr", "0.1"], "seed": 2}, "seed: 1 there, 2 asked for"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, other: dict, said: str) -> None:
    run_in(tmp_path / "r", "--lr", "0.1").claim()
    begin(tmp_path / "r")
    with pytest.raises(RunError, match=said) as caught:
        run_in(tmp_path / "r", *other["flags"], **{name: other[name] for name in other if name != "flags"}).claim()
    assert "give another --out, or delete that folder" in str(caught.value)


def test_a_failed_start_gives_way_to_the_corrected_command(tmp_path: Path) -> None:
    """Its log is kept aside, so that no figure of it is taken for one of the new training."""
    run_in(tmp_path / "r", "--lr", "0.1", "--nonsense").claim()
    (tmp_path / "r" / "checkpoints").mkdir()
    (tmp_path / "r" / "train.log").write_text("unrecognized arguments: --nonsense")
    corrected = run_in(tmp_path / "r", "--lr", "0.1")
    corrected.claim()
    assert runs.read_json(tmp_path / "r" / "run.json") == corrected.settings()
    assert not (tmp_path / "r" / "train.log").exists() and (tmp_path / "r" / "train.failed.log").exists()


def test_a_folder_of_an_earlier_name_goes_on_under_the_present_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its settings are the same: the row that earlier versions called `attention_dropout` sets fairseq's flag."""
    (own,) = select_methods({"own_attention_dropout": {"flags": "--attention-dropout 0.15"}})
    (method,) = select_methods(["attention_dropout"])
    data = run_in(tmp_path).data

    def run_of(one: Method, folder: str = "") -> Run:
        return Run(one, 1, tmp_path / (folder or f"{one.name}-seed1"), data, one.flags, ())

    earlier = "--attn-reg none --attention-dropout 0.3 --attention-dropout 0.15"
    Run(own, 1, tmp_path / "attention_dropout-seed1", data, tuple(earlier.split()), ()).claim()
    begin(tmp_path / "attention_dropout-seed1")
    with pytest.raises(RunError, match=r"earlier versions called attention_dropout is own_attention_dropout\); give"):
        run_of(method).claim()
    with lock_folder(tmp_path / "attention_dropout-seed1"), pytest.raises(RunError, match="still working in"):
        run_of(own, "own_attention_dropout-seed1").claim()
    (other,) = select_methods(["own_attention_dropout"])
    run_of(other, "trial-001").claim()
    assert (tmp_path / "attention_dropout-seed1").is_dir(), "neither other settings nor another kind of folder"
    with monkeypatch.context() as patch:  # another process renames the folder when this one has read it
        hold, before = runs.hold, tmp_path / "attention_dropout-seed1"

        def renamed(folder: Path) -> AbstractContextManager[int]:
            if folder == before and before.exists():
                before.rename(run_of(own).folder)
            return hold(folder)

        patch.setattr(runs, "hold", renamed)
        run_of(own).claim()
    assert (run_of(own).folder / "checkpoints").is_dir()
    run_of(own).folder.rename(before)
    run_of(own).claim()
    assert not (tmp_path / "attention_dropout-seed1").exists()
    assert (tmp_path / "own_attention_dropout-seed1" / "checkpoints" / "checkpoint_last.pt").is_file()
    run_of(method).claim()
    run_of(own).claim()
    assert {path.name for path in tmp_path.glob("*seed1")} == {f"{one.name}-seed1" for one in (own, method)}


def test_a_start_that_another_process_is_making_does_not_give_way(tmp_path: Path) -> None:
    run_in(tmp_path / "r", "--lr", "0.1").claim()
    with lock_folder(tmp_path / "r"), pytest.raises(RunError, match=r"still working in .*r \(process \d+ on .*\)"):
        run_in(tmp_path / "r", "--lr", "0.2").claim()
    assert "0.1" in (tmp_path / "r" / "run.json").read_text()


@pytest.mark.parametrize("name", ["run.json", "result.json"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON in UTF-8"),
        ("[1]", "holds no JSON object, but list"),
        ("\udcff", "is not JSON in UTF-8"),
        ("[" * 100_000, "is not JSON in UTF-8"),
        (None, "isn't a file, so no run wrote it"),
        ('{"training": 5}', "lacks 'best_epoch' in 'training', so no run wrote it"),
        ('{"training": {"epochs": 5}}', "lacks 'best_epoch' in 'training', so no run wrote it"),
    ],
    ids=["cut", "list", "bytes", "deep", "folder", "number", "part"],
)
def test_files_of_a_run_that_are_none_are_named(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    begin(tmp_path)
    with pytest.raises(RunError, match=said if name == "result.json" or "lacks" not in said else "other settings") as e:
        run_in(tmp_path).claim()
        run_in(tmp_path).carry_out(lambda log: None)
    assert str(tmp_path) in str(e.value) and str(e.value).endswith("; give another --out, or delete that folder")
    assert content is None or (tmp_path / name).read_bytes() == content.encode(errors="surrogateescape")


def test_flags_that_nobody_wrote_are_shown_as_they_are(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"flags": "--lr '0.1"})
    begin(tmp_path)
    with pytest.raises(RunError, match=r"--lr: '0\.1 there, 0\.2 asked for"):
        run_in(tmp_path, "--lr", "0.2").claim()


def test_moving_the_folders_changes_nothing(tmp_path: Path) -> None:
    first, second = run_in(tmp_path / "a"), run_in(tmp_path / "b")
    second.data.bin = Path("elsewhere/bin")  # type: ignore[misc]
    assert first.settings() == second.settings()


def test_a_run_is_finished_when_trained_and_translated_with_these_flags(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert not run.finished()
    write_json(tmp_path / "result.json", {"training": TRAINING})
    assert not run.finished()
    write_json(tmp_path / "result.json", {"training": TRAINING, "translation": {"flags": "--beam 5", "scores": {}}})
    assert run.finished()
    assert not replace(run, generate_flags=("--beam", "4")).finished()
    flags = "--bpe opus_mt --opus-mt-folder a/opus_mt --min-len 0"
    write_json(tmp_path / "result.json", {"training": TRAINING, "translation": {"flags": flags, "scores": {}}})
    assert replace(run, generate_flags=tuple(flags.replace(" a/", " b/").split())).finished(), "the data were moved"


def test_a_finished_run_starts_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(runs, "execute", lambda command, *_: started.append(command))
    write_json(tmp_path / "result.json", {"training": TRAINING, "translation": {"flags": "--beam 5", "scores": {}}})
    run_in(tmp_path).carry_out(lambda log: None)
    assert started == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process is still working in"):
            run_in(tmp_path).carry_out(lambda log: None)


def _execute(tmp_path: Path, code: str, seen: list[float]) -> None:
    with runs.hold(tmp_path) as lock:
        command = [sys.executable, "-c", code]
        runs.execute(command, tmp_path / "log", "training of x", lock, lambda log: seen.append(log.position))


def test_a_failing_command_gives_its_last_lines(tmp_path: Path) -> None:
    code = "import sys; [print(f'line {n}') for n in range(50)]; print('the reason', file=sys.stderr); sys.exit(3)"
    with pytest.raises(RunError, match="the training of x ended with exit status 3; its log is") as caught:
        _execute(tmp_path, code, [])
    assert "the reason" in caught.value.tail and "line 49" in caught.value.tail
    assert "line 5\n" not in caught.value.tail


def test_a_growing_log_is_followed_and_kept(tmp_path: Path) -> None:
    """What an earlier process wrote stays in the file, and is not taken for the position of this one."""
    (tmp_path / "log").write_text('old {"epoch": 9, "update": 8.5}\n', encoding="utf-8")
    seen: list[float] = []
    _execute(tmp_path, "print('no record')", seen)
    assert seen[-1] == 0
    _execute(tmp_path, """print('new {"epoch": 1, "update": 0.5}')""", seen)
    assert seen[-1] == 0.5
    assert (tmp_path / "log").read_text(encoding="utf-8").startswith("old")


def test_an_interrupted_comparison_ends_its_command(tmp_path: Path) -> None:
    def interrupt(log: TrainingLog) -> None:
        raise KeyboardInterrupt

    code = "import time; print('{}', flush=True); time.sleep(60)"
    with runs.hold(tmp_path) as lock, pytest.raises(KeyboardInterrupt):
        runs.execute([sys.executable, "-c", code], tmp_path / "log", "x", lock, interrupt)
    with runs.hold(tmp_path):
        pass  # the command holds the lock no longer


def test_every_test_set_is_translated_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def translate(command: list[str], path: Path, what: str, lock: int, **_: object) -> None:
        folder = Path(command[command.index("--results-path") + 1])
        folder.mkdir(exist_ok=True)
        subset = command[command.index("--gen-subset") + 1]
        (folder / f"generate-{subset}.txt").write_text(f"D-1\t0\tb c d e\nD-0\t0\t{subset} x y z\n", "utf-8")

    monkeypatch.setattr(runs, "execute", translate)
    run = run_in(tmp_path)
    run.data.subsets = ("test", "test1")  # type: ignore[misc]
    run.data.references = lambda subset: ["test x y z", "b c d e"]  # type: ignore[misc]
    scores = run._translate(0)["scores"]
    assert scores["test"]["bleu"] == pytest.approx(100) and scores["test1"]["bleu"] < 90
    assert (tmp_path / "translations" / "test1.ro").read_text(encoding="utf-8") == "test1 x y z\nb c d e\n"


def test_the_commands(tmp_path: Path) -> None:
    run = run_in(tmp_path, "--lr", "0.1", seed=7)
    train, generate = run.train_command(), run.generate_command("test1")
    for command in (train, generate):
        assert command[command.index("--user-dir") + 1] == str(runs.USER_DIR)
        assert command[command.index("--required-batch-size-multiple") + 1] == "1"
    assert train[train.index("--seed") + 1] == "7" and train[-2:] == ["--lr", "0.1"]
    assert generate[generate.index("--gen-subset") + 1] == "test1"


def test_methods_and_their_overrides() -> None:
    plain, other = select_methods(["plain", "ad_drop"], ["ad_drop=--ad-drop-p 0.1 --attn-sites 'a b'"])
    assert plain.flags == ("--attn-reg", "none")
    assert other.flags[-4:] == ("--ad-drop-p", "0.1", "--attn-sites", "a b")
    assert other.title == known_methods()["ad_drop"].title


@pytest.mark.parametrize("name", known_methods())
def test_the_flags_of_every_method_are_flags_of_fairseq_train(name: str) -> None:
    options = pytest.importorskip("fairseq.options")
    from attn_reg_plugin.tasks import attn_reg_translation  # noqa: F401 (brings the flags)
    from attn_reg_plugin.tasks.attn_reg_task import regularizer_from

    (method,) = select_methods([name])
    line = ["data", "--task", TASK, "--arch", "transformer", *method.flags]
    regularizer = regularizer_from(options.parse_args_and_arch(options.get_training_parser(), line))
    assert (regularizer.name if regularizer else "none") == method.flags[method.flags.index("--attn-reg") + 1]


@pytest.mark.parametrize(
    ("names", "overrides", "said"),
    [
        (
            ["plain", "drop"],
            [],
            "unknown method 'drop'; the methods are: untuned, plain, own_attention_dropout, own_attention_dropout_0.1",
        ),
        (["plain", "plain"], [], "names a method twice"),
        ([], [], "--methods is empty"),
        (["plain"], ["ad_drop=--x"], "which is not among --methods plain"),
        (["plain"], ["plain"], "wants NAME=FLAGS, given 'plain'"),
    ],
)
def test_bad_methods_are_refused(names: list[str], overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        select_methods(names, overrides)
