"""Scores of examples drawn anew, and the intervals of differences, against literal evaluations of both."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from attn_reg_plugin.experiments.report import differences as module
from attn_reg_plugin.experiments.report.differences import Difference, differences, interval
from attn_reg_plugin.experiments.report.examples import of_kept, of_predictions, of_translations
from attn_reg_plugin.labelled import CLASSIFICATION, REGRESSION, TAGGING
from attn_reg_plugin.labelled.metrics import SCORES, SENTENCE_END, tag_codes

#: sentences of made-up words, two systems of different quality and their references
RANDOM = np.random.default_rng(5)
REFERENCES = [" ".join(RANDOM.choice(list("abcdefgh"), RANDOM.integers(4, 12))) for _ in range(40)]


def spoilt(rate: float, seed: int) -> list[str]:
    """The references with some words exchanged."""
    random = np.random.default_rng(seed)
    return [" ".join("z" if random.random() < rate else word for word in line.split()) for line in REFERENCES]


def classes(count: int, size: int, seed: int, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and gold classes."""
    random, gold = np.random.default_rng(seed), np.random.default_rng(9).integers(0, count, size)
    return np.where(random.random(size) < noise, random.integers(0, count, size), gold), gold


def tags(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sentences of tags as codes, each with its end."""
    codes = np.array(tag_codes(("O", "B-PER", "I-PER", "B-LOC", "I-LOC")))
    lengths = RANDOM.integers(1, 7, size)
    both = [[np.append(RANDOM.choice(codes, length), SENTENCE_END) for length in lengths] for _ in range(2)]
    both[0] = [np.where(RANDOM.random(len(row)) < 0.6, gold, row) for row, gold in zip(*both, strict=True)]
    for row in both[0]:
        row[-1] = SENTENCE_END
    return np.concatenate(both[0]), np.concatenate(both[1])


def drawn_literally(kind: str, row: np.ndarray, predicted: np.ndarray, gold: np.ndarray) -> list[np.ndarray]:
    """The examples of a draw, one after another."""
    parts = [np.arange(len(gold))[:, None]]
    if kind == TAGGING:
        parts = [np.split(np.arange(len(gold)), np.flatnonzero(gold == SENTENCE_END)[:-1] + 1)]
    places = np.concatenate([parts[0][index] for index in np.repeat(np.arange(len(row)), row)])
    return [predicted[places], gold[places]]


@pytest.mark.parametrize(
    ("kind", "both"),
    [
        (CLASSIFICATION, classes(2, 30, 1)),
        (CLASSIFICATION, (np.ones(6), np.array([0, 1, 1, 0, 1, 1]))),
        (CLASSIFICATION, classes(4, 12, 2)),
        (REGRESSION, (RANDOM.normal(1000, 2, 25).round(), RANDOM.normal(1000, 2, 25).round())),
        (REGRESSION, (np.full(5, 3.0), np.arange(5.0))),
        (TAGGING, tags(20)),
    ],
    ids=["two classes", "one prediction", "four classes", "values", "a constant", "tags"],
)
def test_every_metric_of_a_draw_is_the_official_one(kind: str, both: tuple[np.ndarray, np.ndarray]) -> None:
    two = kind != CLASSIFICATION or both[1].max() < 2
    names = [name for name in SCORES[kind] if two or name not in ("f1", "accuracy_f1")]
    found = of_predictions(kind, names, *both)
    assert set(found) == set(names)
    size = found[names[0]].count
    weights = np.random.default_rng(7).multinomial(size, np.full(size, 1 / size), 12)
    weights[0] = 1
    for name in names:
        expected = [SCORES[kind][name](*drawn_literally(kind, row, *both)) for row in weights]
        assert found[name].scores(weights) == pytest.approx(expected, abs=1e-6), name
        kept = found[name].kept
        assert bool(kept) == (name not in ("pearson", "spearman")), name
        assert not kept or of_kept(name, kept).scores(weights) == pytest.approx(expected, abs=1e-3), name


def test_of_one_seed_it_is_sacrebleus_paired_bootstrap() -> None:
    from sacrebleu.metrics import BLEU, CHRF
    from sacrebleu.significance import _bootstrap_resample

    systems = spoilt(0.2, 1), spoilt(0.3, 2)
    mine = [of_translations(system, REFERENCES) for system in systems]
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        found = interval([(mine[0][name], mine[1][name])])
        scores = []
        for system in systems:
            _, resampled = _bootstrap_resample(metric._extract_corpus_statistics(system, [REFERENCES]), metric)
            scores.append(np.array([one.score for one in resampled]))
        assert found == pytest.approx(np.percentile(scores[0] - scores[1], [2.5, 97.5]), abs=1e-4)
        kept = [one[name].kept for one in mine]
        assert all(kept) == (name == "bleu")
        assert name != "bleu" or interval([(of_kept(name, kept[0]), of_kept(name, kept[1]))]) == found


def test_of_several_seeds_it_draws_seeds_and_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESAMPLES", 60)
    method = [classes(2, 20, seed, 0.1) for seed in (1, 2, 3)]
    plain = [classes(2, 20, seed, 0.5) for seed in (4, 5, 6)]
    names = ("accuracy", "mcc")
    mine = [[of_predictions(CLASSIFICATION, names, *both) for both in runs] for runs in (method, plain)]
    random = np.random.default_rng(12345)
    seeds, examples = random.integers(0, 3, (60, 3)), random.integers(0, 20, (60, 20))
    for name in names:
        ends = interval(list(zip(*([run[name] for run in runs] for runs in mine), strict=True)))
        score = SCORES[CLASSIFICATION][name]
        means, whole = [], [score(*one) - score(*other) for one, other in zip(method, plain, strict=True)]
        for chosen, rows in zip(seeds, examples, strict=True):
            by_seed = [
                score(*(x[rows] for x in one)) - score(*(x[rows] for x in other))
                for one, other in zip(method, plain, strict=True)
            ]
            drawn = np.mean([whole[one] for one in chosen]) - np.mean(whole)
            means.append(np.mean(by_seed) + (3 / 2) ** 0.5 * 4.302653 / 1.959964 * drawn)
        assert ends == pytest.approx(np.percentile(means, [2.5, 97.5]))


def run(method: str, seed: int, value: float, examples: dict[str, Any] | None = None) -> Any:
    """A finished run, as far as differences look at it."""
    scores = {("valid", "accuracy"): value, ("valid", "loss"): value / 10}
    by_key = {("valid", metric): one for metric, one in (examples or {}).items()}
    return SimpleNamespace(method=method, seed=seed, scores=scores, examples=by_key)


def test_runs_are_paired_by_seed_and_without_examples_the_interval_is_students() -> None:
    runs = [run("plain", 1, 50.0), run("other", 2, 64.0), run("plain", 2, 60.0), run("other", 1, 52.0)]
    accuracy = differences([*runs, run("other", 3, 99.0)])["other"]["valid"]["accuracy"]
    ends = ttest_1samp([2.0, 4.0], 0).confidence_interval()
    assert dataclasses.astuple(accuracy) == (3.0, *map(pytest.approx, ends), 2, "seeds")
    assert accuracy.text(2) == "+3.00 [-9.71, +15.71]"
    assert differences(runs[:2]) == {} == differences(runs[1:2])
    assert differences(runs, "other")["plain"]["valid"]["accuracy"].mean == -3.0
    alone = differences([runs[0], runs[3]])["other"]["valid"]["loss"]
    assert dataclasses.astuple(alone) == (pytest.approx(0.2), None, None, 1, "nothing") and alone.text(1) == "+0.2"


def test_a_lower_end_that_is_negative_says_so_and_rounding_errors_of_a_tie_do_not() -> None:
    assert Difference(-0.001, -0.004, 0.5, 3, "seeds").text(2) == "-0.00 [-0.00, +0.50]"
    assert Difference(0.0, -1e-15, 0.001, 3, "seeds").text(2) == "+0.00 [+0.00, +0.00]"
