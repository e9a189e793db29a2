"""Results in examples/evidence, read for the tables and plots of `evidence.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_reg_plugin.experiments.report.differences import Difference
from attn_reg_plugin.experiments.report.examples import Examples, of_kept
from attn_reg_plugin.experiments.report.table import Figure
from attn_reg_plugin.experiments.running.flags import completed
from attn_reg_plugin.experiments.running.run import HELD_OUT
from attn_reg_plugin.files import read_json

#: all examples of a test of another distribution, beside those of its groups
ALL = "test"
ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "examples" / "evidence", ROOT / "docs" / "evidence.md"
#: how the probe attributes -> its row in the bench
ATTRIBUTIONS = {"gradient": "ad_drop", "gradient of tokens": "tokens"}
#: rows of the bench that act on the encoder -> those on all attention
ON_ALL = {
    "ad_drop": "all_sites",
    "ad_drop_cross_tuned": "all_sites_cross_tuned",
    "attend_out": "attend_out_all",
    "attention_layer_drop": "attention_layer_drop_all",
}
#: task of GLUE -> its title
GLUE = {"cola": "CoLA", "mrpc": "MRPC", "qnli": "QNLI", "rte": "RTE", "stsb": "STS-B"}
#: experiment -> test set -> its title; others keep their name
TEST_SETS = {
    "translation": {"test": "newsdev2016", "test1": "Tatoeba"},
    "tokens_translation": {"test": "newsdev2016", "test1": "Tatoeba"},
    "translation_tr_en": {"test": "newstest2017", "test1": "Tatoeba"},
    "opus_mt": {
        "test": "TICO-19",
        "test1": "news",
        "250-0": "250 pairs",
        "250-0.25": "250 pairs, 25 % wrong",
        "1000-0": "1,000 pairs",
        "1000-0.25": "1,000 pairs, 25 % wrong",
    },
    "encoders": GLUE,
    "glue_regime": {**GLUE, "rte_mpnet": "RTE, MPNet-base"},
    "few_shot": {"16_gte": "16, gte-small", **{f"{shots}_mpnet": f"{shots}, MPNet-base" for shots in (16, 64, 256)}},
    "tokens_variants": {
        "poisoned_10": "10 % poisoned",
        "poisoned": "8 % poisoned",
        "poisoned_5": "5 % poisoned",
        "poisoned_2": "2 % poisoned",
        "poisoned_1": "1 % poisoned",
    },
    "mnli": {"valid": "matched", "valid1": "hard", "hans": "HANS"},
}


@dataclass(frozen=True)
class Row:
    """A method's chief figure on the reported set.

    Attributes:
        time: of an update, in plain ones; None where it wasn't measured.
        flags: of its trainings.
        scores: by seed.
        chosen: the epoch of the checkpoint, by seed, where it is recorded.
        examples: the score as a function of the test examples, by seed, where the results keep them.
    """

    method: str
    title: str
    score: Figure
    difference: Difference | None
    time: float | None
    flags: Mapping[str, str]
    scores: Mapping[int, float]
    chosen: Mapping[int, int]
    examples: Mapping[int, Examples]


@dataclass(frozen=True)
class Experiment:
    """Result of a results.json on a test set.

    Attributes:
        name: that of its folder.
        subset: the test set.
        metric: the chief one.
    """

    name: str
    subset: str
    metric: str
    rows: tuple[Row, ...]


def named(name: str) -> tuple[str, int]:
    """The method and the seed in the name of a run's folder."""
    method, _, seed = name.rpartition("-seed")
    return method, int(seed)


def reported_scores(entry: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The scores of a run that a results.json has, by subset and metric."""
    pairs = ((subset, name, value) for subset, found in entry["scores"].items() for name, value in found.items())
    return {(subset, name): float(value) for subset, name, value in pairs}


def read_experiments(folder: Path) -> list[Experiment]:
    """The experiments of a folder, one for each test set.

    Raises:
        FileNotFoundError, ValueError: it has no results.json, or that is no comparison's.
    """
    content = read_json(folder / "results.json")
    methods: Sequence[Mapping[str, Any]] = content["methods"]
    runs: dict[str, dict[Any, Mapping[str, Any]]] = {}
    for name, run in content["runs"].items():
        method, seed = named(name)
        runs.setdefault(method, {})[seed] = run
    found, reported = [], scores_of(methods[0])
    translation = any(metric == "bleu" for _, metric in reported)
    measured = costs(translation)
    for subset, metric in reported:
        rows = []
        for one in methods:
            name, score = one["method"], Figure(**scores_of(one)[subset, metric])
            difference = one["differences"].get(subset, {}).get(metric)
            difference = None if difference is None else Difference(**difference)
            flags = flags_of(next(iter(runs[name].values())))
            scores = {seed: reported_scores(run)[subset, metric] for seed, run in runs[name].items()}
            chosen = {seed: run["training"]["best_epoch"] for seed, run in runs[name].items() if "training" in run}
            time = measured.get(benched(flags, translation))
            examples = {
                seed: of_kept(metric, text) for seed, run in runs[name].items() if (text := kept(run, subset, metric))
            }
            rows.append(Row(name, one["title"], score, difference, time, flags, scores, chosen, examples))
        found.append(Experiment(folder.name, subset, "BLEU" if metric == "bleu" else metric, tuple(rows)))
    return found


def kept(run: Mapping[str, Any], subset: str, metric: str) -> str:
    """Return what a results.json keeps of the examples of a run; empty of the oldest runs and of other metrics."""
    return run.get("examples", {}).get(subset, {}).get(metric, "")


def scores_of(row: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """The chief figure of a row of a results.json, by test set and metric."""
    by_subset = row["figures"]
    if ALL in by_subset and "bleu" not in by_subset[ALL]:
        by_subset = {ALL: by_subset[ALL]}
    metric = next(iter(next(iter(by_subset.values()))))
    tests = {subset: figures for subset, figures in by_subset.items() if subset != HELD_OUT and metric in figures}
    return {(subset, metric): figures[metric] for subset, figures in tests.items()}


def flags_of(run: Mapping[str, Any]) -> dict[str, str]:
    """The flags of a run in a results.json."""
    return {f"--{name}": str(value) for name, value in completed(run["flags"]).items()}


def costs(translation: bool) -> dict[str, float]:
    """The time of an update by the bench's rows, in plain ones."""
    path = RESULTS / ("costs.json" if translation else "costs_encoder.json")
    return {row["name"]: row["ratio"] for row in read_json(path)["rows"]}


def benched(flags: Mapping[str, str], translation: bool) -> str:
    """The bench's row of a training with these flags, on the same attention; the name of none where there is none."""
    name = flags.get("--attn-reg", "plain")
    if name == "ad_drop":
        every = flags.get("--ad-drop-cross-tuning") == "off"
        kind = flags.get("--ad-drop-attribution", "gradient") + (
            " of tokens" * (flags.get("--ad-drop-unit") == "token")
        )
        name = ATTRIBUTIONS.get(kind, kind) + ("" if every else "_cross_tuned")
    sites = flags.get("--attn-sites", "encoder.self")
    if name in ("plain", "r_drop"):
        return name
    if sites == "*" and translation:
        return ON_ALL.get(name, "")
    return name if sites in ("*", "encoder.self") else ""


@dataclass(frozen=True)
class Series:
    """Experiments that differ in one value, or in the test set.

    Attributes:
        name: of the folder of their folders, or of their folder.
        parts: by value and test set, the lowest value first.
    """

    name: str
    parts: Mapping[str, Experiment]


def by_numbers(value: str) -> list[tuple[str, float]]:
    """Orders the names of folders, the numbers in them by their size."""
    return [(words, float(number or 0)) for words, number in re.findall(r"([^\d.]*)([\d.]*)", value)]


def read_folder(folder: Path) -> Experiment | Series:
    """The experiment of a folder, or those in it.

    Raises:
        FileNotFoundError, ValueError: see `read_experiments`.
    """
    values = [path.parent.name for path in folder.glob("*/results.json")]
    values.sort(key=by_numbers)
    own = read_experiments(folder) if (folder / "results.json").is_file() else []
    if len(own) == 1 and not values:
        return own[0]
    titles = TEST_SETS.get(folder.name, {})
    parts = {titles.get(one.subset, one.subset): one for one in own}
    for value in values:
        inner = read_experiments(folder / value)
        for one in inner:
            names = [value, one.subset] if len(inner) > 1 else [value]
            parts[", ".join(titles.get(name, name) for name in names)] = one
    return Series(folder.name, parts)


def experiments() -> Iterator[Experiment | Series]:
    """All of them, by name."""
    folders = {path.parent for path in RESULTS.glob("*/results.json")}
    folders |= {path.parent.parent for path in RESULTS.glob("*/*/results.json")}
    for folder in sorted(folders):
        yield read_folder(folder)
