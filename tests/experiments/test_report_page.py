"""`attn-reg report RUNS...`: what the logs say is on the page, and the page opens in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments import report_plots
from attn_reg_plugin.experiments.data_folder import DataFolder
from attn_reg_plugin.experiments.differences import intervals
from attn_reg_plugin.experiments.example_scores import of_predictions
from attn_reg_plugin.experiments.report_logs import mean_curve
from attn_reg_plugin.experiments.report_page import page
from attn_reg_plugin.experiments.report_plots import difference_text
from attn_reg_plugin.experiments.report_runs import Compared, Experiment, compared, read_experiments
from attn_reg_plugin.labelled import TASKS
from tests.experiments.run_folders import fairseq_log, make_comparison, make_fine_tuning, make_run, make_trainer
from tests.experiments.toy_corpus import empty_corpus

METHODS = {"plain": 20.0, "ad_drop": 22.0}


class Table(HTMLParser):
    """The cells of a page's first table, row by row; and all that the page loads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.loaded: list[str] = []
        self.looks: list[str] = []
        self.tables = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.loaded += [given[name] or "" for name in ("src", "href") if name in given]
        self.tables += tag == "table"
        if self.tables == 1 and tag == "tr":
            self.rows.append([])
        if self.tables == 1 and tag in ("td", "th"):
            self.rows[-1].append("")
            self.looks.append(given.get("class") or "")

    def handle_data(self, data: str) -> None:
        if self.tables == 1 and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def one(*paths: Path) -> Experiment:
    """The only experiment in these folders."""
    (experiment,) = read_experiments(paths)
    return experiment


def test_a_comparison_is_read_by_method_and_seed(tmp_path: Path) -> None:
    experiment = one(make_comparison(tmp_path / "runs", METHODS))
    assert experiment.title == "en → ro" and experiment.scores == ["BLEU", "chrF", "best validation nll_loss"]
    plain, other = experiment.groups
    assert experiment.baseline is plain and (plain.title, other.title) == ("PLAIN", "AD DROP")
    assert other.values("BLEU") == pytest.approx({1: 22.1, 2: 22.2, 3: 22.3})
    assert plain.seconds == [4.0] * 3 and plain.rates is None
    assert other.settings == {"--lr": "0.001", "--adam-betas": "(0.9, 0.98)", "--attn-reg": "ad_drop"}
    epochs, values, spread = mean_curve(plain.curves("training nll_loss"))
    assert epochs.tolist() == [1, 2, 3, 4, 5, 6] and values[:2] == pytest.approx([10, 5]) and not spread.any()
    run, rates = other.rates
    assert run.seed == 1 and list(rates) == ["encoder.self[0]", "encoder.self[1]", "decoder.cross[0]"]
    assert rates["encoder.self[1]"].drops == pytest.approx([0.3 / (1 + 1 / epoch) for epoch in range(1, 7)])
    assert rates["encoder.self[0]"].ends.tolist() == [10, 20, 30, 40, 50, 60]


def test_seeds_in_several_folders_are_one_method_unless_settings_differ(tmp_path: Path) -> None:
    first = make_comparison(tmp_path / "first", METHODS, (1, 2))
    second = make_comparison(tmp_path / "second", METHODS, (3,))
    assert [[run.seed for run in group.runs] for group in one(first, second).groups] == [[1, 2, 3]] * 2
    twice = one(first, first / "plain-seed1")
    assert [len(group.runs) for group in twice.groups] == [2, 2], "a run that is given twice counts once"
    settings = second / "ad_drop-seed3" / "run.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace("0.001", "0.002"), encoding="utf-8")
    titles = [group.title for group in one(first, second).groups]
    assert titles == ["PLAIN", "AD DROP (first)", "AD DROP (second)"]
    settings = first / "ad_drop-seed2" / "run.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace("0.001", "0.003"), encoding="utf-8")
    assert [group.title for group in one(first).groups][1:] == ["AD DROP (ad_drop-seed1)", "AD DROP (ad_drop-seed2)"]


def test_rows_of_equal_title_and_folder_name_have_differences_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, accuracy in (("a", 62.0), ("b", 57.0)):
        make_fine_tuning(tmp_path / name / "cola", {"plain": 60.0, "ad_drop": accuracy}, (1, 2, 3))
    experiment = one(tmp_path / "a" / "cola", tmp_path / "b" / "cola")
    found = {group.title: compared(experiment, group, "accuracy") for group in experiment.groups}
    assert {title: None if one is None else one.values for title, one in found.items()} == {
        "ad_drop (a/cola)": (2.0,) * 3,
        "plain (a/cola)": None,
        "ad_drop (b/cola)": (-3.0,) * 3,
        "plain (b/cola)": (0.0,) * 3,
    }
    monkeypatch.setattr(report_plots, "draw", lambda height, fill: "<svg/>")
    table = Table(page([experiment], "title"))
    assert [row[3].split()[0] for row in table.rows[1:]] == ["+2.00", "–", "-3.00", "+0.00"]
    assert table.looks[len(table.rows[0]) :].index("best") == 2, "the first row's accuracy"
    monkeypatch.setattr(report_plots, "MOST_LINES", 3)
    assert report_plots.convergence(experiment, "validation accuracy")[1] == 1


def test_every_baseline_has_an_experiment_of_its_own(tmp_path: Path) -> None:
    """Of trainings on other numbers of examples each is compared with plain training on as many."""
    for count, plain in (("250", 50.0), ("4000", 80.0)):
        folder = make_fine_tuning(tmp_path / count, {"plain": plain, "ad_drop": plain + 0.5}, (1, 2))
        for run in folder.glob("*/run.json"):
            settings = json.loads(run.read_text(encoding="utf-8"))
            part = f" --train-examples {count} --total-num-update {2 * int(count)}"
            run.write_text(json.dumps({**settings, "flags": settings.get("flags", "") + part}), encoding="utf-8")
    experiments = read_experiments([tmp_path])
    title = one(make_fine_tuning(tmp_path / "alone", {"plain": 1.0}, (1,))).title
    assert [each.title for each in experiments] == [f"{title} (--train-examples {count})" for count in (250, 4000)]
    for each in experiments:
        assert [compared(each, group, "accuracy") is None for group in each.groups] == [False, True]
        assert compared(each, each.groups[0], "accuracy").values == pytest.approx((0.5, 0.5))


def test_trainings_of_trainer_are_read(tmp_path: Path) -> None:
    make_trainer(tmp_path / "plain-seed1", 0.5)
    make_trainer(tmp_path / "mine-seed1", 0.4, drop=0.3)
    make_trainer(tmp_path / "mine-seed2", 0.6, drop=0.1, finished=False)
    experiment = one(tmp_path)
    mine, plain = experiment.groups
    assert experiment.baseline is plain and experiment.scores == ["f1", "validation loss"]
    assert mine.values("f1") == {1: 1.0, 2: 1.0} and mine.values("validation loss") == {1: 0.4, 2: 0.6}
    assert mine.seconds == [3.0], "the second didn't end, so its time isn't known"
    assert mine.curves("training loss")[0] == pytest.approx({0.5: 1.4, 1.0: 0.9, 1.5: 0.4 + 1 / 3, 2.0: 0.65})
    assert mine.rates[1]["encoder.self[0]"].drops[-1] == pytest.approx(0.3)
    assert mine.settings["attn_reg"] == "ad_drop" and plain.settings["model_type"] == "bert"


def test_unfinished_runs_and_bare_logs_are_read(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "plain-seed1", {"seed": 1, "task": "rte"}, {}, fairseq_log(2, 1.0))
    (group,) = one(tmp_path / "runs").groups
    assert group.runs[0].figures.scores == {"best validation nll_loss": pytest.approx(1.04)}
    log = tmp_path / "train.log"
    log.write_text(fairseq_log(3, 2.0, drop=0.5), encoding="utf-8")
    (group,) = one(log).groups
    assert group.title == "train" and group.rates is not None and group.runs[0].figures.epochs == 3


def test_the_table_has_means_differences_and_few_seeds_in_grey(tmp_path: Path) -> None:
    make_comparison(tmp_path / "runs", METHODS)
    shutil.rmtree(tmp_path / "runs" / "ad_drop-seed2")
    (untuned := tmp_path / "runs" / "untuned-seed1").mkdir()
    result = json.loads((tmp_path / "runs" / "plain-seed1" / "result.json").read_text(encoding="utf-8"))
    result["training"] |= {"epochs": 0, "seconds_per_epoch": None}
    (untuned / "result.json").write_text(json.dumps(result), encoding="utf-8")
    shutil.copy(tmp_path / "runs" / "plain-seed1" / "run.json", untuned)
    assert main(["report", str(tmp_path / "runs")]) == 0
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    table = Table(page)
    header, plain, other, *rest = table.rows
    assert header[:4] == ["method", "runs", "BLEU", "Δ PLAIN"] and header[-1] == "time × PLAIN"
    assert plain[:4] == ["PLAIN", "3", "20.20 ± 0.10", "–"]
    assert other[:4] == ["AD DROP", "2", "22.20 ± 0.14", "+2.00 [+2.00, +2.00]"] and other[-1].split()[0] == "1.50"
    assert [[cell[0] for cell in row[-2:]] for row in rest] == [["–", "–"]], "what isn't trained has no time"
    assert "few" in table.looks[len(header) * 2 :] and "few" not in table.looks[: len(header) * 2]
    assert "<code>--attn-reg ad_drop</code>" in page and "BLEU: difference to PLAIN" in page
    assert all(link.startswith(("data:", "#")) for link in table.loaded) and len(table.loaded) > 8
    assert not re.search(r"<script|url\(|@import|<link rel=.stylesheet", page)
    assert main(["report", "html", str(tmp_path / "runs"), "--out", str(tmp_path / "new" / "again.html")]) == 0
    assert (tmp_path / "new" / "again.html").read_text(encoding="utf-8") == page, "the same runs give the same page"


def of(experiment: Experiment, score: str) -> Compared:
    """How the method that isn't the baseline differs from it; the baseline differs from nothing."""
    (other,) = [group for group in experiment.groups if group is not experiment.baseline]
    assert experiment.baseline is not None and compared(experiment, experiment.baseline, score) is None
    found = compared(experiment, other, score)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("task", "labels", "end"),
    [("rte", TASKS["rte"].labels, ""), ("xpos", ("NN", "VB"), "\n")],
    ids=["classes", "tags named by the training file alone, of sentences of one word"],
)
def test_the_interval_is_computed_from_the_examples_in_the_folders(
    task: str, labels: tuple[str, str], end: str, tmp_path: Path
) -> None:
    """As a comparison computes it; without examples of seeds alone, and of one seed without them there is none."""
    runs, (no, yes) = make_fine_tuning(tmp_path / "runs", {"plain": 50.0, "ad_drop": 60.0}, task=task), labels
    right = {("plain", 1): 10, ("plain", 2): 9, ("ad_drop", 1): 12, ("ad_drop", 2): 14}
    of_method: dict[str, list[Any]] = {"plain": [], "ad_drop": []}
    for (method, seed), count in right.items():
        rows = [(no if place < count else yes, no) for place in range(20)]
        path = runs / f"{method}-seed{seed}" / "predictions" / "valid.tsv"
        path.parent.mkdir()
        lines = "".join(f"{one}\t{gold}\n{end}" for one, gold in rows)
        path.write_text(f"prediction\tgold\n{lines}", encoding="utf-8")
        path.with_name("valid1.tsv").write_text("".join(path.read_text().splitlines(True)[:13]), encoding="utf-8")
        result = json.loads((path.parents[1] / "result.json").read_text(encoding="utf-8"))
        result["reported"] = {"scores": {"valid1": {"accuracy": 50.0}}}
        (path.parents[1] / "result.json").write_text(json.dumps(result), encoding="utf-8")
        classes = np.array([[float(label == yes) for label in row] for row in rows]).T
        of_method[method].append(of_predictions("classification", ["accuracy"], *classes)["accuracy"])
    (expected,) = intervals([list(zip(of_method["ad_drop"], of_method["plain"], strict=True))])
    found = of(one(runs), "accuracy")
    assert found == Compared((10.0, 10.0), expected, "seeds and examples") and expected[0] < 10 < expected[1]
    assert of(one(runs), "accuracy valid1").drawn == "seeds and examples", "another set, of fewer examples"
    assert "bootstrap of seeds and examples; of one seed" in page([one(runs)], "title")
    alone = of(one(runs / "plain-seed1", runs / "ad_drop-seed1"), "accuracy")
    assert alone.drawn == "examples" and alone.interval[0] < 10 < alone.interval[1]
    (runs / "plain-seed1" / "predictions" / "valid.tsv").write_text("odd\n", encoding="utf-8")
    assert of(one(runs), "accuracy") == Compared((10.0, 10.0), (10.0, 10.0), "seeds")
    assert of(one(runs / "plain-seed1", runs / "ad_drop-seed1"), "accuracy") == Compared((10.0,), None, "nothing")


def test_references_are_found_beside_the_runs_or_where_the_log_says(tmp_path: Path) -> None:
    """If they are those of the data that the run was trained on."""
    runs, data = make_comparison(tmp_path / "runs", METHODS, (1,)), empty_corpus(tmp_path / "far" / "off")
    for name in ("bin/test1.en-ro.en.idx", "raw/test1.ro"):
        (data / name).unlink()
    (data / "raw" / "test.ro").write_text("".join(f"a b c d {n}\n" for n in range(12)), encoding="utf-8")
    digest = DataFolder.open(data).digest()
    for method in METHODS:
        folder = runs / f"{method}-seed1"
        settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        (folder / "run.json").write_text(json.dumps({**settings, "data": digest}), encoding="utf-8")
        (folder / "translations").mkdir()
        lines = "".join(f"a b {'c' if n % 3 and method == 'plain' else 'd'} d {n}\n" for n in range(12))
        (folder / "translations" / "test.ro").write_text(lines, encoding="utf-8")
    assert of(one(runs), "BLEU").interval is None, "the data folder isn't known"
    shutil.copytree(data, runs / "data")
    beside = of(one(runs), "BLEU")
    assert beside.drawn == "examples" and beside.interval[0] < beside.interval[1]
    (runs / "data" / "bin" / "dict.en.txt").write_text("other", encoding="utf-8")
    assert of(one(runs), "BLEU").interval is None, "other data"
    for method in METHODS:
        log = runs / f"{method}-seed1" / "train.log"
        said = f"INFO | {{'task': {{'data': '{data / 'bin'}'}}}}\n"
        log.write_text(said + log.read_text(encoding="utf-8"), encoding="utf-8")
    assert of(one(runs), "BLEU") == beside
    for method, references in (("plain", DataFolder.open(data).digest_of_references()), ("ad_drop", "others")):
        assert of(one(runs), "BLEU") == beside, "those that the run was scored with"
        settings = json.loads((runs / f"{method}-seed1" / "run.json").read_text(encoding="utf-8"))
        (runs / f"{method}-seed1" / "run.json").write_text(json.dumps({**settings, "references": references}))
    assert of(one(runs), "BLEU").interval is None, "references that have changed since"
    assert difference_text(Compared((2.0, 2.2), (1.25, 2.5)), 2) == "+2.10 [+1.25, +2.50]"
    assert difference_text(Compared((2.0,)), 2) == "+2.00"


def test_what_runs_are_called_is_text_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_plots, "draw", lambda height, fill: "<svg/>")
    make_comparison(tmp_path / "runs", {"plain": 20.0, "<b>&x": 21.0})
    assert main(["report", str(tmp_path / "runs"), "--title", "<i>"]) == 0
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert "&lt;B&gt;&amp;X" in page and "<B>" not in page and "<h1>&lt;i&gt;</h1>" in page


def test_what_cannot_be_reported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = make_comparison(tmp_path / "runs", METHODS, (1,))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "trainer_state.json").write_text("{}", encoding="utf-8")
    for words, said in (
        ([tmp_path / "absent"], f"there is no run {tmp_path / 'absent'}"),
        ([tmp_path / "empty"], f"{tmp_path / 'empty'} holds no run: neither run.json of attn-reg"),
        ([tmp_path / "broken"], "trainer_state.json has no log_history, so Trainer did not write it"),
        ([runs, "--out", tmp_path / "page.pdf"], "page.pdf, but its name must end in .html or .htm"),
    ):
        assert main(["report", *map(str, words)]) == 2
        assert said in capsys.readouterr().err
    (runs / "plain-seed1" / "run.json").write_text("{", encoding="utf-8")
    assert main(["report", str(runs)]) == 2
    assert "run.json is not JSON" in capsys.readouterr().err and not (runs / "report.html").exists()


#: put into the page: what a browser made of it, for the page around it
_LOOK = """<script>
const errors = []; addEventListener("error", e => errors.push(String(e.message || e.target.src)), true);
addEventListener("load", () => { const root = document.documentElement, pictures = [...document.images];
  const wide = [...document.querySelectorAll("body *")].filter(e => !e.closest(".box")
    && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName);
  parent.postMessage({ width: innerWidth, content: root.scrollWidth, wide, errors, pictures: pictures.length,
    drawn: pictures.filter(p => p.naturalWidth > 0 && p.getBoundingClientRect().width > 250).length,
    small: parseFloat(getComputedStyle(document.querySelector("td")).fontSize),
    boxes: [...document.querySelectorAll(".box")].every(b => b.scrollWidth <= b.clientWidth
      || getComputedStyle(b).overflowX == "auto") }, "*"); });
</script>"""
_AROUND = """<body><pre id="found">{}</pre><script>const found = {};
addEventListener("message", e => { found[e.data.width] = e.data;
  document.getElementById("found").textContent = JSON.stringify(found); });</script>
<iframe src="page.html" width="1280" height="900"></iframe><iframe src="page.html" width="400" height="900"></iframe>"""


def test_it_opens_in_a_browser(tmp_path: Path) -> None:
    """At 1280 and at 400 pixels: every picture is there, nothing is wider than the page, nothing is on the console."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    many = {"plain": 20.0, "ad_drop": 22.0, "a_method_with_a_name_that_is_quite_long": 19.0, "few": 21.0}
    make_comparison(tmp_path / "runs" / "translation", many)
    make_fine_tuning(tmp_path / "runs" / "labelled", METHODS)
    make_trainer(tmp_path / "runs" / "trainer" / "mine", drop=0.2)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<head>", f"<head>{_LOOK}", 1), encoding="utf-8")
    around = tmp_path / "around.html"
    around.write_text(_AROUND, encoding="utf-8")
    # a window of a browser without a screen is at least 500 pixels wide, so the narrow page is in a frame
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=10000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--dump-dom", around.as_uri()]
    shown = subprocess.run([browser, *flags], capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="found">(.*?)</pre>', shown.stdout)
    assert match, shown.stderr[-2000:]
    found = json.loads(match[1])
    assert set(found) == {"1280", "400"}
    pictures = text.count("<img ")
    for width, seen in found.items():
        assert seen["pictures"] == seen["drawn"] == pictures > 15, (width, seen)
        assert seen["content"] <= int(width) and not seen["wide"], (width, seen)
        assert not seen["errors"] and seen["boxes"] and seen["small"] >= 12, (width, seen)
    assert "CONSOLE" not in shown.stderr, shown.stderr[-2000:]
