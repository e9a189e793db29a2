"""Captions of the tables of docs/evidence.md: the settings of an experiment, for `evidence.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

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


def usual(rows: Sequence[Row], at: int) -> str:
    """The most frequent of `settings_of`, and the rows that have others."""
    values = {row.title: settings_of(row)[at] for row in rows}
    (most, _), *others = Counter(values.values()).most_common()
    told = []
    for value, _ in others:
        short = value.replace("p ", "").replace(", q ", " and ")
        titles = [title for title, own in values.items() if own == value and short not in title]
        told.append(f"{value} in *{'*, *'.join(titles)}*" if titles else "others where named")
    return most + (f" ({'; '.join(dict.fromkeys(told))})" if told else "")


def caption(found: Experiment | Series) -> str:
    """p, q, sites, cross-tuning, seeds, and what chose the checkpoint."""
    parts = list(found.parts.values()) if isinstance(found, Series) else [found]
    rows = [row for part in parts for row in part.rows]
    dropping, flags = [row for row in rows if settings_of(row)], rows[0].flags
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
    own = [usual(dropping, at) for at in range(3)] if dropping else []
    own += ["mean pooling"] if flags.get("--pooling") == "mean" else []
    return f"*{'; '.join([*own, f'seeds {seeds}', f'{epochs} epochs, {decay}', f'checkpoint {chosen_by}'])}.*"
