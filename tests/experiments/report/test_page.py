"""`attn-reg report OUT...`: the runs in folders, what is on the page, and that it opens in a browser."""

import json
import math
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments.report.curves import draw_curves, limits, mean_curve
from attn_reg_plugin.experiments.report.differences import Difference, interval
from attn_reg_plugin.experiments.report.examples import Examples, of_predictions, of_translations
from attn_reg_plugin.experiments.report.page import Experiment, read_experiment
from tests.experiments.report.run_folders import make_comparison, make_fine_tuning

METHODS = {"plain": 20.0, "ad_drop": 22.0}


def difference(
    experiment: Experiment, method: str = "ad_drop", subset: str = "valid", metric: str = "accuracy"
) -> Difference:
    return next(row for row in experiment.rows if row.method == method).differences[subset][metric]


def table_of(text: str) -> list[list[str]]:
    """The cells of a page's first table."""
    first = text[text.index("<table") : text.index("</table>")]
    rows = re.findall(r"<tr.*?</tr>", first, re.DOTALL)
    return [[unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


def test_a_comparison_is_read_by_method_and_seed(tmp_path: Path) -> None:
    experiment = read_experiment(make_comparison(tmp_path, METHODS))
    assert [(run.method, run.seed) for run in experiment.runs] == [(m, n) for m in METHODS for n in (1, 2, 3)]
    plain, other = experiment.runs[0], experiment.runs[3]
    assert plain.seconds == 4.0 and other.scores["test", "bleu"] == pytest.approx(22.1)
    found = mean_curve([run.curves["training nll_loss"] for run in experiment.runs[:3]])
    assert found.index.tolist() == [1, 2, 3, 4, 5, 6] and found["mean"][:2].tolist() == [10, 5]
    assert difference(experiment, subset="test", metric="bleu").text(2) == "+2.00 [+2.00, +2.00]"


@pytest.mark.parametrize("kind", ["classification", "tagging"])
def test_the_interval_is_computed_from_the_examples_in_the_folders(kind: str, tmp_path: Path) -> None:
    """As a comparison computes it; without examples of seeds alone, and of a single seed without them there is none."""
    right = {"plain": (10, 9), "ad_drop": (12, 14)}
    make_fine_tuning(tmp_path, right, kind)

    def examples(count: int) -> Examples:
        return of_predictions("classification", ["accuracy"], np.arange(20) >= count, np.zeros(20))["accuracy"]

    pairs = [tuple(examples(right[method][seed]) for method in ("ad_drop", "plain")) for seed in (0, 1)]
    expected = interval(pairs)
    found = difference(read_experiment(tmp_path))
    assert (found.mean, found.drawn) == (17.5, "seeds and examples") and (found.low, found.high) == expected
    assert difference(read_experiment(tmp_path, "ad_drop"), "plain").mean == -17.5
    for method in right:
        shutil.rmtree(tmp_path / f"{method}-seed2")
    assert difference(read_experiment(tmp_path)).drawn == "examples"
    shutil.rmtree(tmp_path / "plain-seed1" / "predictions")
    found = difference(read_experiment(tmp_path))
    assert (found.mean, found.low, found.drawn) == (10.0, None, "nothing")


def test_translations_are_drawn_with_the_references_beside_them(tmp_path: Path) -> None:
    make_comparison(tmp_path, METHODS, (1,))
    references = [f"a b c d {n}" for n in range(12)]
    systems = {m: [f"a b {'c' if n % 3 and m == 'plain' else 'd'} d {n}" for n in range(12)] for m in METHODS}
    for method, lines in systems.items():
        (folder := tmp_path / f"{method}-seed1" / "translations").mkdir()
        for name, text in (("test.ro", lines), ("test.references.ro", references)):
            (folder / name).write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    found = difference(read_experiment(tmp_path), subset="test", metric="bleu")
    expected = interval([tuple(of_translations(systems[m], references)["bleu"] for m in ("ad_drop", "plain"))])
    assert (found.low, found.high, found.drawn) == (*expected, "examples")


def test_the_page(tmp_path: Path) -> None:
    root = make_comparison(tmp_path / "runs", {**METHODS, "<b>$x$": 21.0})
    (root / "ad_drop-seed3" / "result.json").unlink()
    assert main(["report", str(root)]) == 0
    text = (root / "report.html").read_text(encoding="utf-8")
    header, plain, other, odd = table_of(text)
    assert header[:4] == ["method", "BLEU", "BLEU − plain", "chrF"] and header[-2:] == ["elapsed × plain", "seeds"]
    assert plain[:3] == ["plain", "20.20 ± 0.10", "–"] and odd[0] == "<b>$x$"
    assert other[:3] == ["ad_drop", "22.15 ± 0.07", "+2.00 [+2.00, +2.00]"] and other[-2:] == ["1.50", "2"]
    assert "<i>22.15 ± 0.07</i>" in text and "<i>20.20" not in text
    assert "not finished, so left out: ad_drop (seed 3)" in text and "--attn-reg ad_drop" in text
    order = [text.index(f"<h3>{part}") for part in ("Differences", "Curves", "Cost", "Configuration")]
    assert sorted(order) == order and order[-1] < text.index("tok:13a"), "signatures come after the plots"
    links = re.findall(r'(?:src|href)="(.*?)"', text)
    assert all(link.startswith("data:") for link in links) and len(links) > 6
    assert not re.search(r"<script|url\(|@import|<link rel=.stylesheet", text)
    again, log = tmp_path / "new" / "again.html", root / "ad_drop-seed3" / "train.log"
    log.write_text(log.read_text(encoding="utf-8")[: log.stat().st_size // 2], encoding="utf-8")
    assert main(["report", str(root), "--out", str(again)]) == 0
    assert again.read_text(encoding="utf-8") == text, "the same finished runs give the same page"


def test_methods_that_are_not_compared_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_fine_tuning(tmp_path, {"a": (10,), "b": (12,)})
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.htm")]) == 0
    assert "no method is called 'plain', so none is compared with it; --baseline names" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--baseline", "a"]) == 0
    assert "− a" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_folders_that_make_no_page_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = make_comparison(tmp_path / "runs", {"plain": 20.0}, (1,))
    (runs / "plain-seed1" / "result.json").unlink()
    (empty := tmp_path / "empty").mkdir()
    (file := tmp_path / "results.json").touch()
    silent = make_comparison(tmp_path / "silent", {"plain": 20.0}, (1,))
    (silent / "plain-seed1" / "result.json").write_text('{"scores": {}}', encoding="utf-8")
    mixed = make_comparison(tmp_path / "mixed", {"plain": 20.0}, (1,))
    make_fine_tuning(mixed, {"other": (10,)})
    left = make_comparison(make_fine_tuning(tmp_path / "left", {"a": (9,)}), {"b": 20.0}, (1,))
    (left / "b-seed1" / "result.json").unlink()
    for words, said in (
        ([mixed], "one experiment: plain-seed1 and other-seed1 are of other tasks or data than each other"),
        ([tmp_path / "absent"], "there is no folder"),
        ([file], "results.json is a file; give a folder of attn-reg compare or finetune"),
        ([silent], "has 1 runs, but none of them is finished and has a score"),
        ([empty], "has no runs of attn-reg compare or finetune in it"),
        ([runs], "has 1 runs, but none of them is finished and has a score"),
        ([runs, "--out", tmp_path / "page.pdf"], "page.pdf, but its name must end in .html or .htm"),
    ):
        assert main(["report", *map(str, words)]) == 2 and said in capsys.readouterr().err
    assert not list(tmp_path.glob("**/*.htm*"))
    assert main(["report", str(left)]) == 0, "what is not finished is left out, whatever it is of"


def test_without_matplotlib_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(make_comparison(tmp_path, METHODS, (1,)))]) == 2
    assert "matplotlib is not installed; in the checkout of this package" in capsys.readouterr().err


def test_a_curve_is_the_mean_of_the_epochs_that_all_seeds_have() -> None:
    found = mean_curve([{1: 4.0, 2: 3.0, 3: 2.0}, {2: 5.0, 1: 6.0}])
    assert found["mean"].to_dict() == {1: 5.0, 2: 4.0} and found["std"].tolist() == pytest.approx([2**0.5] * 2)
    assert mean_curve([{1: 4.0}])["std"].tolist() == [0.0]
    runs = [SimpleNamespace(title=t, curves={"validation loss": c}) for t, c in (("a", {1: 2.0}), ("a", {2: 1.0}))]
    assert not draw_curves(runs, "validation loss").axes[0].lines, "a method whose runs share no epoch has no line"


def test_the_axis_shows_all_ends_and_leaves_out_the_start() -> None:
    low, high = limits([[90.0, 3.0], [90.0, 2.0, 2.5]])
    assert 1 < low < 2.0 and 3.0 < high < 10
    for equal in ([2.0, 2.0], [2.0, math.nan]):
        assert limits([equal]) == pytest.approx((1.9, 2.1))


_LOOK = """<script>addEventListener("load", () => {
  const images = [...document.images], sizes = [...document.querySelectorAll("body *")].map(
    (one) => parseFloat(getComputedStyle(one).fontSize));
  const wide = [...document.querySelectorAll("img, h1, ul, figure, .box")].filter(
    (one) => one.getBoundingClientRect().right > innerWidth);
  parent.postMessage([String(innerWidth), {
    pictures: images.length, drawn: images.filter((one) => one.naturalWidth > 0).length,
    content: document.documentElement.scrollWidth, wide: wide.map(String), small: Math.min(...sizes)}], "*");
});</script>"""
_AROUND = """<pre id="found"></pre><script>const found = {};
addEventListener("message", (event) => { found[event.data[0]] = event.data[1];
  document.getElementById("found").textContent = JSON.stringify(found); });</script>
<iframe src="page.html" width="1280" height="900"></iframe><iframe src="page.html" width="400" height="900"></iframe>"""


def test_it_opens_in_a_browser(tmp_path: Path) -> None:
    """At 1280 and at 400 pixels: every picture is there, nothing is wider than the page, nothing is on the console."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    folders = [make_comparison(tmp_path / "mt", {**METHODS, "a_method_with_a_name_that_is_quite_long": 19.0})]
    folders.append(make_fine_tuning(tmp_path / "labelled", {"plain": (10, 9), "ad_drop": (12, 14)}))
    path = tmp_path / "page.html"
    assert main(["report", *map(str, folders), "--out", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("<head>", f"<head>{_LOOK}", 1), encoding="utf-8")
    (around := tmp_path / "around.html").write_text(_AROUND, encoding="utf-8")
    # a window of a browser without a screen is at least 500 pixels wide, so the narrow page is in a frame
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=10000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--dump-dom", around.as_uri()]
    shown = subprocess.run([browser, *flags], capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="found">(.*?)</pre>', shown.stdout)
    assert match, shown.stderr[-2000:]
    found = json.loads(match[1])
    assert set(found) == {"1280", "400"}
    for width, seen in found.items():
        assert seen["pictures"] == seen["drawn"] == text.count("<img ") > 8, (width, seen)
        assert seen["content"] <= int(width) and not seen["wide"] and seen["small"] >= 12, (width, seen)
    assert "CONSOLE" not in shown.stderr, shown.stderr[-2000:]
