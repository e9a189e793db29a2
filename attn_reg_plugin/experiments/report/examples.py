"""Scores of a run as functions of its examples, so that they can be computed again of examples drawn at random.

Nearly every score is a function of sums over the examples: BLEU of matched n-grams, accuracy and F1 of counts,
Pearson's correlation of products. Such scores of many draws are one product of matrices. Spearman's correlation ranks
anew.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn_reg_plugin.labelled.metrics import SENTENCE_END, tag_sequences
from attn_reg_plugin.labelled.task_table import CLASSIFICATION, REGRESSION, TAGGING

#: from sums over examples (R, K) to scores (R,)
Score = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Examples:
    """A score of a run as a function of its examples.

    Attributes:
        count: N, the number of examples (sentences, of taggers and of translations).
        scores: the score of every draw, (R,), from how often each example is in each draw, whole numbers (R, N).
        kept: for `of_kept`; of chrF, of single correlations and of more than ten classes empty.
    """

    count: int
    scores: Callable[[np.ndarray], np.ndarray]
    kept: str = ""


def of_sums(statistics: np.ndarray, score: Score, kept: str = "") -> Examples:
    """A score that is a function of the sums of statistics, (N, K), over examples."""
    return Examples(len(statistics), lambda weights: score(weights @ statistics), kept)


def of_kept(metric: str, text: str) -> Examples:
    """Read a score from what a results.json keeps of it.

    Args:
        text: of BLEU and of taggers a word a sentence, its statistics; of accuracy a digit an example, 1 where it is
            right; else predictions, a slash and gold labels, a digit each, or values with spaces between them.
    """
    if "," in text:
        rows = [[int(one) for one in word.split(",")] for word in text.split()]
        if metric != "bleu":
            return _of_parts(np.array(rows, dtype=np.float64), _TAGGING[metric], 5, text)
        from sacrebleu.metrics import BLEU

        return _of_statistics(BLEU(), rows, text)
    if "/" in text:
        kind, split = (REGRESSION, str.split) if " " in text else (CLASSIFICATION, list)
        both = (np.array(split(part), dtype=np.float64) for part in text.split("/"))
        return of_predictions(kind, [metric], *both)[metric]
    right = np.array([[digit == "1", True] for digit in text], dtype=np.float64)
    return of_sums(right, lambda sums: 100 * sums[:, 0] / sums[:, 1], text)


def bleu_of(language: str) -> Any:
    """sacrebleu's BLEU with the words of a language, `zh`, `zh_CN` or `zho_Hans`; a ValueError says what it lacks."""
    from sacrebleu.metrics import BLEU

    code = re.split("[-_]", language)[0].lower()
    try:
        return BLEU(trg_lang={"zho": "zh", "jpn": "ja", "kor": "ko"}.get(code, code))
    except RuntimeError as error:
        raise ValueError(" ".join(str(error).split())) from None


def of_translations(hypotheses: Sequence[str], references: Sequence[str], language: str = "") -> dict[str, Examples]:
    """BLEU and chrF of a test set in a language, of the statistics that sacrebleu's own bootstrap adds up."""
    from sacrebleu.metrics import CHRF

    metrics = bleu_of(language), CHRF()
    bleu, chrf = (metric._extract_corpus_statistics(list(hypotheses), [list(references)]) for metric in metrics)
    return {"bleu": _of_statistics(metrics[0], bleu, _rows(bleu)), "chrf": _of_statistics(metrics[1], chrf)}


def _of_statistics(metric: Any, statistics: Sequence[Sequence[int]], kept: str = "") -> Examples:
    """Make a metric of sacrebleu a function of the examples."""

    def scores(sums: np.ndarray) -> np.ndarray:
        return np.array([metric._compute_score_from_stats(row.tolist()).score for row in sums])

    return of_sums(np.array(statistics, dtype=np.float64), scores, kept)


def of_predictions(kind: str, names: Sequence[str], predicted: np.ndarray, gold: np.ndarray) -> dict[str, Examples]:
    """Official metrics, see `labelled/metrics.py`, by name; a name that is in no table here is left out.

    Args:
        kind: of the task.
        predicted, gold: (N,) each: classes, values, or codes of tags with `SENTENCE_END` after every sentence.
    """
    if kind == REGRESSION:
        pearson, spearman = _pearson(predicted, gold), Examples(len(gold), _spearman(predicted, gold))
        kept = "/".join(" ".join(f"{value:.5g}" for value in values) for values in (predicted, gold))
        both = Examples(len(gold), lambda weights: (pearson.scores(weights) + spearman.scores(weights)) / 2, kept)
        known = {"pearson": pearson, "spearman": spearman, "pearson_spearman": both}
        return {name: known[name] for name in names if name in known}
    if kind == TAGGING:
        statistics = _of_sentences(predicted, gold)
        kept = _rows(statistics.astype(int))
        return {name: _of_parts(statistics, _TAGGING[name], 5, kept) for name in names if name in _TAGGING}
    statistics = _of_classes(predicted, gold)
    digits = ("".join(map(str, some.astype(int))) for some in (predicted, gold))
    kept = "/".join(digits) if statistics.shape[1] <= 3 * 10 else ""
    found = {name: _of_parts(statistics, _CLASSES[name], 3, kept) for name in names if name in _CLASSES}
    if "accuracy" in found:
        found["accuracy"] = of_kept("accuracy", "".join("01"[right] for right in (predicted == gold).tolist()))
    return found


def _of_parts(statistics: np.ndarray, score: Callable[..., np.ndarray], parts: int, kept: str) -> Examples:
    return of_sums(statistics, lambda sums: 100 * score(*np.split(sums, parts, axis=1)).reshape(len(sums)), kept)


def _rows(statistics: Sequence[Sequence[int]] | np.ndarray) -> str:
    return " ".join(",".join(map(str, row)) for row in statistics)


# -- classes: what is predicted, what is gold and what is right, of every class ---------------------------------------


def _of_classes(predicted: np.ndarray, gold: np.ndarray) -> np.ndarray:
    columns = np.eye(int(max(predicted.max(), gold.max(), 1)) + 1)
    predictions, golds = columns[predicted.astype(int)], columns[gold.astype(int)]
    return np.concatenate([predictions, golds, predictions * golds], axis=1)


def _accuracy(predicted: np.ndarray, gold: np.ndarray, right: np.ndarray) -> np.ndarray:
    return _ratio(right.sum(1), gold.sum(1))


def _f1(predicted: np.ndarray, gold: np.ndarray, right: np.ndarray) -> np.ndarray:
    return _ratio(2 * right[:, 1], predicted[:, 1] + gold[:, 1])


def _macro_f1(predicted: np.ndarray, gold: np.ndarray, right: np.ndarray) -> np.ndarray:
    found = _ratio(2 * right, predicted + gold)  # classes that are not in a draw at all do not count
    return _ratio(found.sum(1), (predicted + gold > 0).sum(1))


def _mcc(predicted: np.ndarray, gold: np.ndarray, right: np.ndarray) -> np.ndarray:
    total = gold.sum(1)
    shared = right.sum(1) * total - (predicted * gold).sum(1)
    spread = (total**2 - (predicted**2).sum(1)) * (total**2 - (gold**2).sum(1))
    return _ratio(shared, np.sqrt(spread))


_CLASSES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro_f1": _macro_f1,
    "mcc": _mcc,
    "accuracy_f1": lambda *sums: (_accuracy(*sums) + _f1(*sums)) / 2,
}

# -- tags: entities and words of every sentence -----------------------------------------------------------------------


def _of_sentences(predicted: np.ndarray, gold: np.ndarray) -> np.ndarray:
    """(sentences, 5): entities predicted, gold and right; words and right words."""
    from seqeval.metrics.sequence_labeling import get_entities

    ends = np.flatnonzero(gold == SENTENCE_END)
    rows = []
    for start, end in zip([0, *(ends[:-1] + 1)], ends, strict=True):
        tags = [
            [tag for sentence in tag_sequences(codes[start:end]) for tag in sentence] for codes in (predicted, gold)
        ]
        found, wanted = (set(get_entities(some)) for some in tags)
        right = int((predicted[start:end] == gold[start:end]).sum())
        rows.append((len(found), len(wanted), len(found & wanted), end - start, right))
    return np.array(rows, dtype=np.float64)


_TAGGING: dict[str, Callable[..., np.ndarray]] = {
    "accuracy": lambda found, wanted, both, words, right: _ratio(right, words),
    "f1": lambda found, wanted, both, words, right: _ratio(2 * both, found + wanted),
    "precision": lambda found, wanted, both, words, right: _ratio(both, found),
    "recall": lambda found, wanted, both, words, right: _ratio(both, wanted),
}

# -- values -----------------------------------------------------------------------------------------------------------


def _pearson(predicted: np.ndarray, gold: np.ndarray) -> Examples:
    x, y = predicted - predicted.mean(), gold - gold.mean()  # so that no difference of large sums is taken

    def score(sums: np.ndarray) -> np.ndarray:
        count, x, y, xx, yy, xy = sums.T
        spread = np.maximum(xx - x * x / count, 0) * np.maximum(yy - y * y / count, 0)
        return 100 * _ratio(xy - x * y / count, np.sqrt(spread))

    return of_sums(np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1), score)


def _spearman(predicted: np.ndarray, gold: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Spearman's correlation of draws, whose values are ranked anew."""
    from scipy.stats import rankdata

    def score(weights: np.ndarray) -> np.ndarray:
        drawn = (np.repeat(np.stack([predicted, gold]), row, axis=1) for row in weights.astype(np.int64))
        moments = np.array([np.cov(rankdata(one, axis=1)).ravel() for one in drawn])
        return 100 * _ratio(moments[:, 1], np.sqrt(moments[:, 0] * moments[:, 3]))

    return score


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """The quotient; 0 where it isn't defined, as in `labelled/metrics.py`."""
    return np.divide(above, below, out=np.zeros_like(above, dtype=np.float64), where=below > 0)
