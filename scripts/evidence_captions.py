"""Captions of the tables of docs/evidence.md: the settings of an experiment, for `evidence.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from evidence_results import Experiment, Row, Series


def settings_of(row: Row) -> tuple[str, str, str] | None:
    """p and q, sites, and when it acts, of a row of AD-DROP."""
    flags = row.flags
    if flags.get("--attn-reg") != "ad_drop":
        return None
    tuned = "every update" if flags.get("--ad-drop-cross-tuning") == "off" else "cross-tuned"
    return f"p {flags['--ad-drop-p']}, q {flags['--ad-drop-q']}", f"`{flags['--attn-sites']}`", tuned


def counted(values: Iterable[int]) -> str:
    """Numbers as text: `1 to 5`, `3 and 10`."""
    found = sorted(set(values))
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return " and ".join(map(str, found))


def usual(parts: Mapping[str, Sequence[Row]], at: int) -> str:
    """The most frequent of `settings_of`, and the parts of a series, or the rows, that have others."""
    values = [(part, row.title, settings_of(row)[at]) for part, rows in parts.items() for row in rows]
    (most, _), *others = Counter(value for *_, value in values).most_common()
    told = []
    for value, _ in others:
        holders = [(part, title) for part, title, own in values if own == value]
        whole = dict.fromkeys(part for part, _ in holders)
        short = value.replace("p ", "").replace(", q ", " and ")
        titles = dict.fromkeys(title for _, title in holders if short not in title)
        if not any(part in whole and own != value for part, _, own in values):
            told.append(f"{value} for {' and '.join(whole)}")
        else:
            told.append(f"{value} in *{'*, *'.join(titles)}*" if titles else "others where named")
    return most + (f" ({'; '.join(dict.fromkeys(told))})" if told else "")


def caption(found: Experiment | Series) -> str:
    """p, q, sites, cross-tuning, seeds, and what chose the checkpoint."""
    parts = found.parts if isinstance(found, Series) else {"": found}
    rows = [row for part in parts.values() for row in part.rows]
    dropping = {name: [row for row in part.rows if settings_of(row)] for name, part in parts.items()}
    flags = rows[0].flags
    epochs = counted(int(row.flags["--max-epoch"]) for row in rows if row.method == "plain")
    chosen_by = "by held-out score" if "--held-out" in flags else "by validation loss"
    if flags.get("--validate-interval", "1") == flags["--max-epoch"]:
        chosen_by = "of the last epoch"
    courses = {
        "polynomial_decay": "linear decay",
        "inverse_sqrt": "inverse square-root decay",
        "fixed": "constant rate",
    }
    decay = courses[flags["--lr-scheduler"]]
    seeds = counted(seed for row in rows for seed in row.scores)
    if isinstance(found, Series) and len({len(row.scores) for row in rows}) > 1:
        seeds += ", fewer in parentheses"
    own = [usual(dropping, at) for at in range(3)] if any(dropping.values()) else []
    own += ["mean pooling"] if flags.get("--pooling") == "mean" else []
    return f"*{'; '.join([*own, f'seeds {seeds}', f'{epochs} epochs, {decay}', f'checkpoint {chosen_by}'])}.*"
