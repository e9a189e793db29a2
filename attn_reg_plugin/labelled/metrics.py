"""The official metrics, of predictions collected over a whole validation set; in percent, as the papers print them.

scikit-learn, scipy and seqeval compute them. Where a metric is not defined (a correlation with a constant, a single
example) it is 0, so that one bad validation isn't NaN, which no later one would beat.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attn_reg_plugin.labelled.task_table import (
    CLASSIFICATION,
    MULTIPLE_CHOICE,
    PLACES,
    REGRESSION,
    TAGGING,
    entity_tags,
)

Score = Callable[[np.ndarray, np.ndarray], float]
#: `PLACES` as seqeval writes them, which does not know BILOU
_WRITTEN = "BIESES"
#: stands between the sentences of collected tags
SENTENCE_END = -1


def accuracy(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Share of right classes; of tags, between whose sentences `SENTENCE_END` stands, of right tags."""
    from sklearn.metrics import accuracy_score

    real = gold != SENTENCE_END
    return 100 * float(accuracy_score(gold[real], predicted[real]))


def f1(predicted: np.ndarray, gold: np.ndarray, **options: Any) -> float:
    """F1 of the second class, of two (MRPC, QQP); or as scikit-learn's options say."""
    from sklearn.metrics import f1_score

    return 100 * float(f1_score(gold, predicted, zero_division=0, **options))


def macro_f1(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Mean F1 of all classes."""
    return f1(predicted, gold, average="macro")


def mcc(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Matthews correlation (CoLA)."""
    from sklearn.metrics import matthews_corrcoef

    return 100 * float(matthews_corrcoef(gold, predicted)) if _varies(predicted, gold) else 0.0


def _correlation(name: str) -> Score:
    """Make a correlation of scipy's a metric (STS-B)."""

    def score(predicted: np.ndarray, gold: np.ndarray) -> float:
        import scipy.stats

        return 100 * float(getattr(scipy.stats, name)(predicted, gold)[0]) if _varies(predicted, gold) else 0.0

    return score


def _varies(*values: np.ndarray) -> bool:
    return all(len(some) > 1 and np.isfinite(some).all() and np.ptp(some) > 0 for some in values)


def _mean(first: Score, second: Score) -> Score:
    """Make the mean of two metrics a metric, as GLUE averages those of MRPC, QQP and STS-B."""
    return lambda predicted, gold: (first(predicted, gold) + second(predicted, gold)) / 2


def _entity(name: str) -> Score:
    """Make precision, recall or F1 of whole entities, by seqeval, over all types together, a metric."""

    def score(predicted: np.ndarray, gold: np.ndarray) -> float:
        import seqeval.metrics

        measure = getattr(seqeval.metrics, f"{name}_score")
        return 100 * float(measure(tag_sequences(gold), tag_sequences(predicted), zero_division=0))

    return score


_PEARSON, _SPEARMAN = _correlation("pearsonr"), _correlation("spearmanr")
_CLASSES: dict[str, Score] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "mcc": mcc,
    "accuracy_f1": _mean(accuracy, f1),
}
#: kind of task -> name -> metric; of taggers all but the accuracy are of entities
SCORES: dict[str, dict[str, Score]] = {
    CLASSIFICATION: _CLASSES,
    MULTIPLE_CHOICE: _CLASSES,
    REGRESSION: {"pearson": _PEARSON, "spearman": _SPEARMAN, "pearson_spearman": _mean(_PEARSON, _SPEARMAN)},
    TAGGING: {"accuracy": accuracy, **{name: _entity(name) for name in ("f1", "precision", "recall")}},
}


def tag_codes(labels: Sequence[str]) -> list[int]:
    """Number tags by all that scores of entities depend on: the place in an entity and the entity's type.

    Scores are computed where only numbers arrive (fairseq adds up what ranks log). Tags that aren't `O` or a place and
    a type, such as `B-PER`, belong to no entity.
    """
    tags = entity_tags(labels)
    types, codes = sorted({tag[2:] for tag in tags}), []
    for number, label in enumerate(labels):
        if label in tags:
            codes.append(len(PLACES) * (1 + types.index(label[2:])) + PLACES.index(label[0]))
        else:
            codes.append(0 if label == "O" else -2 - number)
    return codes


def tag_sequences(codes: np.ndarray) -> list[list[str]]:
    """Turn codes into sentences of tags; a sentence ends with `SENTENCE_END`. Types are numbered."""
    whole, sentences = codes.astype(np.int64), []
    for sentence in np.split(whole, np.flatnonzero(whole == SENTENCE_END)):
        pairs = [divmod(code, len(PLACES)) for code in sentence[sentence != SENTENCE_END].tolist()]
        sentences.append([f"{_WRITTEN[place]}-{kind}" if kind > 0 else "O" for kind, place in pairs])
    return [sentence for sentence in sentences if sentence]


def check_scores(names: Sequence[str], kind: str, labels: Sequence[str]) -> None:
    """Refuse metrics that a task cannot have, by a ValueError."""
    known = SCORES[kind]
    for name in names:
        if name not in known:
            raise ValueError(f"unknown metric {name!r} of {kind}; the metrics are: {', '.join(known)}")
        if known is _CLASSES and name in ("f1", "accuracy_f1") and len(labels) != 2:
            raise ValueError(f"{name} is of two classes, but the labels are {', '.join(labels)}; use macro_f1")
        if kind == TAGGING and name != "accuracy":
            other = [label for label in labels if label not in {"O", *entity_tags(labels)}]
            if other:
                raise ValueError(f"{name} of entities needs labels such as B-PER, but there is {other[0]!r}")
