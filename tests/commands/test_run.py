"""`attn-reg run`: the configurations in examples/ are planned, in order and with flags over them; nothing is run."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attn_reg_plugin.cli import main
from attn_reg_plugin.corpora.phrasebook import splits
from attn_reg_plugin.experiments import translation
from attn_reg_plugin.experiments.converting import Conversion
from attn_reg_plugin.experiments.methods import select_methods
from attn_reg_plugin.experiments.steps import Step, plan
from tests.experiments.starting import empty_corpus
from tests.opus_mt.folders import make_marian

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEN = list(range(10))
DEMO, WMT16, OPUS_MT, GLUE = (EXAMPLES / name / f"{name}.yaml" for name in ("demo", "wmt16", "opus_mt", "glue"))


def settings(path: Path, *words: str) -> list[Any]:
    """The settings of each step."""
    return [step.settings for step in plan(path, words)]


def test_the_demo() -> None:
    corpus, comparison = settings(DEMO, "--epochs", "3", "--out", "o", "--methods", "plain,ad_drop")
    assert corpus.noise > 0 and corpus.out == comparison.data == Path("o/data")
    assert (comparison.jobs, comparison.epochs, comparison.out) == (2, 3, Path("o"))
    plain, chosen = select_methods(comparison.methods)
    assert plain.name == "plain" and chosen.flags != select_methods("ad_drop")[0].flags
    assert len(select_methods(settings(DEMO)[1].methods)) >= 4


def test_wmt16_gives_each_step_its_flags() -> None:
    line = ["--pair", "tr-en", "--limit", "9", "--layers", "2", "--source=a b", "--cpu", "--vocab-size", "50"]
    corpus, comparison = settings(WMT16, *line, "--", "--fp16")
    assert (corpus.pair, corpus.limit, corpus.source, corpus.vocab_size) == ("tr-en", 9, "a b", 50)
    assert corpus.out == comparison.data == Path("runs/wmt16-tr-en/data")
    assert (comparison.layers, comparison.cpu, comparison.own_flags) == (2, True, {"fp16": True})


@pytest.mark.parametrize(("pair", "p", "q"), [("en-ro", "0.2", "0.2"), ("tr-en", "0.6", "0.1")])
def test_opus_mt_has_the_authors_settings(
    pair: str, p: str, q: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o"
    empty_corpus(out / "data")
    (out / "data" / "manifest.json").write_text(json.dumps({"splits": {"train": {"kept": 33}}}))
    (out / "model").mkdir()
    (out / "model" / "fairseq.flags").write_text("--arch opus_mt --encoder-layers 2 --dropout 0.1\n", encoding="utf-8")
    line = ["--pair", pair, "--out", str(out), "--model", "mine", "--limit=9", "--cpu", "--", "--fp16"]
    start, corpus, comparison = settings(OPUS_MT, *line)
    assert (start.model, start.languages, start.out) == ("mine", pair, out / "model")
    assert (corpus.max_pieces, corpus.limit, corpus.opus_mt, corpus.source) == (128, 9, out / "model", "hub")
    monkeypatch.setattr(translation, "updates_of", lambda one: 15)  # of a corpus that is not there
    untuned, plain, ad_drop = comparison.plan(select_methods(comparison.methods))
    command = " ".join(ad_drop.train_command())
    for part in (
        f"--arch opus_mt --encoder-layers 2 --dropout 0.1 --finetune-from-model {out}/model/checkpoint.pt",
        "--lr 2e-05 --lr-scheduler polynomial_decay --warmup-updates 0 --total-num-update 15",
        "--max-epoch 5 --batch-size 16 --distributed-world-size 1",
        "--cpu",
        "--adam-betas (0.9, 0.999)",
        "--fp16",
        f"--ad-drop-p {p} --ad-drop-q {q}",
    ):
        assert part in command
    assert untuned.flags["lr"] == 0 and "max-update" not in plain.flags
    search = {"bpe": "opus_mt", "opus-mt-folder": f"{out}/data/opus_mt", "min-len": "0", "max-len-b": "510", "beam": 4}
    assert search.items() <= plain.settings["generate"].items()
    (other,) = replace(comparison, dropout=0.2).plan(select_methods("plain"))
    assert "--dropout 0.2 " in " ".join(other.train_command()), "one's own goes before the model's"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("each: {seed: [1, 2]}\nfinetune: {seeds: '${seed}', task: rte, data: d, out: 'o'}", "${seed}"),
        (
            "each: {n: [1, 2], m: [plain, r_drop]}\nfinetune: {methods: '${m}', task: rte, data: d, out: 'o/${n}'}",
            "${m}",
        ),
        ("each: {n: [2, 3], lr: [1, 2]}\ncompare: {layers: '${n}', lr: '${lr}', data: d, out: 'o/${lr}'}", "${n}"),
    ],
)
def test_combinations_with_one_folder_are_refused(text: str, said: str, tmp_path: Path) -> None:
    """Before anything is trained: the later one's table would take the place of the other's."""
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"c\.yaml: .*\bo\b.*; put {re.escape(said)} into out$"):
        plan(tmp_path / "c.yaml", [])
    (tmp_path / "c.yaml").write_text(text.replace("out: 'o", f"out: '{said}/o"))
    assert len({one.out for one in settings(tmp_path / "c.yaml")}) == len(settings(tmp_path / "c.yaml")) >= 2


def test_the_same_comparison_may_come_again(tmp_path: Path) -> None:
    """As beside a step that is another one each time; it is done already."""
    (tmp_path / "c.yaml").write_text(
        "each: {n: [1, 2]}\ncompare: {data: d, out: o}\nprepare phrasebook: {pair: en-ro, out: 'd${n}'}"
    )
    first, _, second, _ = settings(tmp_path / "c.yaml")
    assert first == second


def test_a_model_is_converted_once_and_a_folder_belongs_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Conversion(model=str(tmp_path / "first"), languages="en-ro", out=tmp_path / "model")
    texts = [[getattr(one, language) for one in splits(300, 1, 1)["train"]] for language in ("en", "ro")]
    make_marian(tmp_path / "first", ("en", "ro"), texts)
    (tmp_path / "model").mkdir()
    start.carry_out()
    checkpoint = tmp_path / "model" / "checkpoint.pt"
    written = checkpoint.stat().st_mtime_ns
    start.carry_out()
    (tmp_path / "link").symlink_to(tmp_path / "first")
    monkeypatch.chdir(tmp_path / "model")
    replace(start, model=str(tmp_path / "link"), out=Path()).carry_out()
    assert checkpoint.stat().st_mtime_ns == written, "it was done"
    for other, said in (
        ({"model": "other"}, "was converted with model .*first, not other; give another OUT"),
        ({"languages": "ro-en"}, "was converted with languages en-ro, not ro-en; give another OUT"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(start, **other).carry_out()
    config = tmp_path / "first" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(ValueError, match=r"was converted with files \w+, not \w+; give another OUT"):
        start.carry_out()
    record = tmp_path / "model.name"
    config.write_text(config.read_text().rstrip("\n") + "\n")
    record.unlink()
    said = r"isn't empty, and no model\.name says what was converted there; give another"
    with pytest.raises(ValueError, match=said):
        start.carry_out()


def test_a_report_of_several_folders_is_a_step(tmp_path: Path) -> None:
    """A setting that is null is left out."""
    (tmp_path / "c.yaml").write_text("report: {runs: [a, b], out: null, title: t}")
    (found,) = settings(tmp_path / "c.yaml")
    assert (found.runs, found.out, found.title) == ((Path("a"), Path("b")), None, "t")


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        ("a: 1", [], "has no step; the steps are: convert opus-mt, prepare phrasebook"),
        ("pair: ???\ncompare: {data: '${pair}'}", [], "--pair is missing: "),
        ("compare: {data: d, out: o, epoch: 3}", [], "unknown setting 'epoch'; the settings are: "),
        ("compare: {data: d, out: o, epochs: 0}", [], "c.yaml: epochs is 0, but must be at least 1"),
        ("compare: {data: d, out: o}", ["--epochs", "x"], "--epochs is 'x', but must be a whole number"),
        ("export: {run_folder: '${gone}'}", [], "Interpolation key 'gone' not found"),
        ("each: {a: 1}\ncompare: {data: d, out: o}", [], "each is {'a': 1}, but must be a mapping of names to lists"),
        (
            f"each: {{a: {TEN}, b: {TEN}, c: {TEN}, d: {TEN}}}\ncompare: {{data: d, out: '${{a}}${{b}}${{c}}${{d}}'}}",
            [],
            "each has 10,000 combinations, but at most 1,000 are possible",
        ),
        ("report: {folder: r}", [], "unknown setting 'folder'; the settings are: runs, out"),
        ("bench: {repeats: x}", [], "repeats is 'x', but must be a whole number"),
        ("export: 5", [], "export is 5, but must be a mapping of settings"),
        ("script gone.py: {a: 1}", [], "script gone.py: there is no file"),
        ("compare: {data: d, out: o}\nepochs: 3", [], "c.yaml: unknown key 'epochs': it is in no section"),
        (
            "prepare wmt16: {pair: en-ro, source: s, out: o, long_pairs: x}",
            [],
            "c.yaml: long_pairs is 'x', but must be one",
        ),
        (
            "prepare phrasebook: {pair: en-ro, out: o}",
            ["--", "--fp16"],
            "c.yaml has no step that takes flags of fairseq",
        ),
        ("compare: {data: d, out: o}\nfinetun: {}", [], "c.yaml: unknown step 'finetun'; the steps are: convert"),
    ],
)
def test_refusals(
    content: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(content)
    assert main(["run", str(tmp_path / "c.yaml"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and ("c.yaml" in error or said.startswith("--")) and error.count("\n") == 1


@pytest.mark.parametrize(
    ("section", "settings", "said"),
    [
        ("compare", "data: d, train_examples: 1.5", "train_examples is 1.5, but must be a whole number"),
        (
            "compare",
            "data: d, train_fraction: 0.5, train_examples: 3",
            "--train-examples and --train-fraction cannot be given together",
        ),
        ("compare", "data: d, methods: 'plain,magic'", "methods: unknown method 'magic'; the methods are: untuned"),
        ("compare", "data: d, seeds: [1, 1]", "--seeds wants distinct whole numbers"),
        ("compare", "data: d, heads: 3", "--heads 3 does not divide --embed-dim 512"),
        ("finetune", "task: rt, data: d", "unknown labelled task 'rt'; the tasks are: cola"),
        ("finetune", "task: mnli, data: d, metric: f1", "f1 is of two classes, but the labels are entailment"),
        (
            "finetune",
            "task: stsb, data: d, train_per_class: 16",
            "--train-per-class is for classification, but stsb is",
        ),
    ],
)
def test_what_a_file_says_is_refused_by_file_and_key(
    section: str, settings: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command itself and by `run`; nothing is written."""
    path = tmp_path / "c.yaml"
    path.write_text(f"out: {tmp_path}/out\n{section}: {{out: '${{out}}', {settings}}}\n", encoding="utf-8")
    for line in ([section, path], ["run", path]):
        assert main([*map(str, line)]) == 2
        error = capsys.readouterr().err
        assert f"attn-reg {line[0]}: {path}: {said}" in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_step_that_ends_otherwise_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    codes = {1: 0, 2: 130, 3: None}
    ends = [partial(lambda number: done.append(number) or codes[number], number) for number in codes]
    steps = [Step("x", SimpleNamespace(carry_out=end), Path("c")) for end in ends]
    monkeypatch.setattr("attn_reg_plugin.commands.plan", lambda *_: steps)
    assert main(["run", "x.yaml", "--a", "b"]) == 130 and done == [1, 2]
