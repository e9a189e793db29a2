"""The configurations of both papers' tables and figures: all are accepted, and run at toy size."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from attn_reg_plugin.experiments.steps import EACH, plan
from attn_reg_plugin.regularizers.scheduled_dropout import Schedule
from tests.experiments.starting import empty_corpus
from tests.experiments.toy import run_toy, toy_steps
from tests.regularizers.registered import methods_of_readme

PAPERS = Path(__file__).resolve().parents[2] / "examples" / "papers"
FILES = sorted(path.stem for path in PAPERS.glob("*.yaml"))
#: these also run in the everyday suite
CHEAP = ("ad_drop_efficiency", "attend_out_figure_3")
#: so many trainings that one value of `each` is enough; the others have their turn in other files
MANY = ("rivals", "rivals_translation")
TENTHS = [number / 10 for number in range(1, 10)]
#: a few are enough where each costs half a second
ACCEPTED = {"ad_drop_table_1": ["--task", "cola,stsb,mnli", "--model", "bert-base-uncased"]}

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(name: str, *words: str) -> list[Any]:
    return [step.settings for step in plan(PAPERS / f"{name}.yaml", words)]


def each_value(name: str) -> list[list[str]]:
    """Flags with which every value of `each` has its turn, but of `MANY`."""
    names = OmegaConf.to_container(OmegaConf.load(PAPERS / f"{name}.yaml")).get(EACH, {})
    turns = 1 if name in MANY else max(map(len, names.values()), default=1)
    return [
        [word for key, values in names.items() for word in (f"--{key}", str(values[turn % len(values)]))]
        for turn in range(turns)
    ]


def run(name: str, tmp_path: Path, *words: str) -> None:
    out = ["--out", str(tmp_path / "runs-toy")] if "out" in OmegaConf.load(PAPERS / f"{name}.yaml") else []
    run_toy(PAPERS / f"{name}.yaml", *out, *words)
    assert not (tmp_path / "runs").exists(), "it stays aside"


@pytest.mark.parametrize("name", FILES)
def test_every_configuration_is_accepted(name: str) -> None:
    assert settings(name, *ACCEPTED.get(name, []))
    assert (PAPERS / "README.md").read_text(encoding="utf-8").count(f"`{name}.yaml`") == 1


@pytest.mark.parametrize("path", sorted((PAPERS.parent / "evidence").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_of_the_evidence_is_accepted(path: Path) -> None:
    try:
        assert plan(path, [])
    except ValueError as error:  # files of one's own, of which the columns are looked up
        assert re.search(r"data/evidence/\S+ is no folder", str(error))


@pytest.mark.parametrize("name", CHEAP)
def test_cheap_ones_run(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)
    if name == "attend_out_figure_3":
        assert (tmp_path / "runs-toy" / "figure_3.png").read_bytes().startswith(b"\x89PNG")
        learned = Schedule.read(str(tmp_path / "runs-toy" / "learned.txt")).entries
        assert len(learned) == 12 and learned[11][1].points[-1][0] > 1, "a curve over the updates"


def test_the_demo_runs(tmp_path: Path) -> None:
    run_toy(PAPERS.parent / "demo" / "demo.yaml", "--out", str(tmp_path / "runs"), "--jobs", "1")
    rows = json.loads((tmp_path / "runs-toy" / "results.json").read_text(encoding="utf-8"))["methods"]
    assert len(rows) == 4 and all(row["figures"]["test"]["bleu"]["seeds"] == 1 for row in rows)


@pytest.mark.papers
@pytest.mark.parametrize(("name", "words"), [(name, words) for name in FILES for words in each_value(name)])
def test_every_configuration_runs(name: str, words: list[str], tmp_path: Path) -> None:
    run(name, tmp_path, *words)
    assert name == "ad_drop_efficiency" or list((tmp_path / "runs-toy").rglob("results.json"))


def test_the_settings_of_ad_drop() -> None:
    (sweep,) = settings("ad_drop_table_1", "--task", "cola", "--model", "roberta-base")
    space = {key: list(how.choices) for key, how in sweep.choices.items()}
    assert space == {"lr": [1e-5, 2e-5, 3e-5], "batch_size": [16, 32, 64], "p": TENTHS, "q": TENTHS}
    assert (sweep.comparison().lr_scheduler, sweep.comparison().patience) == ("fixed", 5)
    (ner,) = settings("ad_drop_table_2_ner")
    assert ner.methods["ad_drop"] == {"p": 0.8, "q": 0.1} and "electra" in ner.model
    for pair, p, q in (("en-ro", 0.2, 0.2), ("tr-en", 0.6, 0.1)):
        _, corpus, compared = settings("ad_drop_table_2_translation", "--pair", pair)
        assert compared.methods["ad_drop"] == {"p": p, "q": q, "sites": "encoder.self"}
        assert (corpus.max_pieces, corpus.long_pairs) == (128, "truncate")
        assert (compared.metric, compared.epochs, compared.lr, compared.lr_scheduler) == ("bleu", 5, 2e-5, "linear")
    assert all(one.seeds == (1, 2, 3, 4, 5) for one in settings("ad_drop_table_3"))
    assert {one.train_per_class for one in settings("ad_drop_table_5")} == {16, 64, 256}
    for name, words in (("ad_drop_figure_4", []), ("ad_drop_figure_6", ["--task", "rte"])):
        sweep, _ = settings(name, *words)
        space = {key: list(how.choices) for key, how in sweep.choices.items()}
        assert space["p"] == space["q"] == TENTHS and not sweep.trials
        assert space.get("cross_tuning", ["epoch", "off"]) == ["epoch", "off"]


def test_the_settings_of_attend_out() -> None:
    names = [f"attend_out_{part}" for part in ("glue", "tagging", "swag", "imdb")]
    all_of = list(itertools.chain.from_iterable(settings(name) for name in names))
    assert {one.task for one in all_of} == {"sst2", "mrpc", "qnli", "mnli", "cola", "conll2003", "ptb", "swag", "imdb"}
    wanted = {"plain", "scores_dropout_0.1", "scores_dropout_0.2", "layer_drop", "attention_layer_drop", "attend_out"}
    for one in all_of:
        assert {method.name for method in one.selected()} == wanted
        assert one.max_length == (512 if one.task == "imdb" else 128)
        by_name = {method.name: method for method in one.selected()}
        assert by_name["layer_drop"].value("p") == by_name["attention_layer_drop"].value("p") == 0.2
    assert [one.task for one in settings("attend_out_scheduler")] == ["cola", "qnli", "swag"]
    (stand_in,) = settings("attend_out_tagging", "--task", "xpos")
    assert stand_in.data == "data/UD_English-EWT"


def test_all_rivals_are_compared_under_the_same_rules() -> None:
    """Every method of the README has a row, one run a seed; of translation all but a loss of classification."""
    (encoders,) = settings("rivals", "--task", "rte")[:1]
    _, _, translators = settings("rivals_translation", "--pair", "tr-en")[:3]
    for compared, left_out in ((encoders, set()), (translators, {"hidden_cut"})):
        rows = [method.regularizer for method in compared.selected()]
        assert {name for row in rows if row for name in row.split("+")} == set(methods_of_readme()) - left_out, (
            "examples/papers/rivals*.yaml and README's table have the same methods"
        )
        assert "ad_drop+r_drop" in rows and None in rows and len(compared.seeds) == 5
    found = {method.name: method for method in translators.selected()}
    assert (found["ad_drop"].value("p"), found["r_drop_5"].value("weight")) == (0.6, 5.0)


def test_each_is_every_combination(tmp_path: Path) -> None:
    empty_corpus(tmp_path / "d")
    (tmp_path / "say.py").write_text("import sys; print(*sys.argv[1:]); sys.exit(len(sys.argv))")
    path = tmp_path / "c.yaml"
    path.write_text(
        "each: {a: [1, 2], b: [x, y]}\nout: o\n"
        "compare: {data: d, out: '${out}/${a}${b}'}\n"
        "script say.py: {words: '${out}/r-${b}', on: hans, fast: true}\n"
    )
    found = [step.settings for step in plan(path, [])]
    assert [str(one.out) for one in found[::2]] == ["o/1x", "o/1y", "o/2x", "o/2y"]
    assert [one[1] for one in found[1::2]] == ["o/r-x", "o/r-y", "o/r-x", "o/r-y"]
    chosen = plan(path, ["--a", "2,7", "--b", "y"])
    assert [str(step.settings.out) for step in chosen[::2]] == ["o/2y", "o/7y"]
    assert found[1] == [str(tmp_path / "say.py"), "o/r-x", "--on", "hans", "--fast"]
    assert chosen[1].carry_out() == 5, "its exit status"
    assert [step.section for step in toy_steps(path)] == ["compare", "script say.py"]
    assert str(toy_steps(path)[0].settings.out) == "o-toy/1x"
