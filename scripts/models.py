"""Rebuild the tables of docs/models.md from docs/models.json, after trying models of transformers:

    python scripts/models.py               # the page alone
    python scripts/models.py '*/mpnet/*'   # these head/model type/class, then the page
    python scripts/models.py '*'           # all, in some ten minutes

A model is tried tiny, by the oracle of tests/backends/oracle_records.py. The tables go between the lines
`<!-- table NAME -->` and `<!-- end -->` of the page.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pages import filled  # noqa: E402

from attn_reg_plugin.files import read_json, write_text  # noqa: E402

RECORDS = ROOT / "docs" / "models.json"
PAGE = ROOT / "docs" / "models.md"
#: what heads are called, as they are in the records
HEADS = {
    "causal": "causal LM",
    "masked": "masked LM",
    "seq2seq": "sequence to sequence",
    "sequence": "text classification",
    "token": "tagging",
    "answer": "question answering",
    "choice": "multiple choice",
    "image": "image classification",
    "ctc": "speech (CTC)",
}
Records = dict[str, dict[str, Any]]
Rows = list[tuple[str, dict[str, Any]]]


def read_records() -> Records:
    """Read the records, by `head/model type/class`."""
    return read_json(RECORDS)["models"] if RECORDS.exists() else {}


def write_records(records: Mapping[str, Any]) -> None:
    """Write the records, a model a line."""
    import transformers

    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(made)}" for name, made in sorted(records.items()))
    version = json.dumps(transformers.__version__)
    write_text(RECORDS, f'{{"transformers": {version}, "models": {{\n{lines}\n}}}}\n')


def try_models(patterns: Iterable[str]) -> Records:
    """The records, with those that match a pattern made anew; models that transformers no longer has are left out."""
    from tests.backends.oracle_models import pairs
    from tests.backends.oracle_records import record

    known, made = read_records(), {}
    for pair in pairs():
        name = "/".join(pair)
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            made[name] = record(*pair)
            print(name, made[name], flush=True)
        elif name in known:
            made[name] = known[name]
    return made


# -- tables -----------------------------------------------------------------------------------------------------------


def by_type(records: Records) -> dict[str, Rows]:
    """(head, record) of each model type."""
    types: dict[str, Rows] = {}
    for name, made in sorted(records.items(), key=lambda item: list(HEADS).index(item[0].partition("/")[0])):
        head, kind, _ = name.split("/")
        types.setdefault(kind, []).append((head, made))
    return dict(sorted(types.items()))


def good(rows: Rows) -> Rows:
    """List the models that train as the stock one does."""
    return [(head, made) for head, made in rows if made["outcome"] == "same"]


def cell(text: str) -> str:
    """Text for a cell."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def answer(rows: Rows, part: str) -> str:
    """`yes`, `no` or nothing for all heads; where they differ, what is said of which."""
    said: dict[str, list[str]] = {}
    for head, made in rows:
        said.setdefault(made.get(part, "").partition(":")[0], []).append(HEADS[head])
    said.pop("", None)
    if len(said) < 2:
        return next(iter(said), "")
    return f"yes; no: {', '.join(dict.fromkeys(said['no']))}"


def remarks(rows: Rows) -> str:
    """List what has no site, and why something doesn't work."""
    without = dict.fromkeys(name for _, made in rows for name in made.get("without", ()))
    said = [f"without a site: {', '.join(f'`{name}`' for name in without)}"] if without else []
    reasons = [
        f"{part}{made[part][2:]}"
        for _, made in rows
        for part in ("checkpointing", "packed")
        if made.get(part, "").startswith("no")
    ]
    return cell("; ".join([*said, *dict.fromkeys(reasons)]))


def table_of_good(records: Records) -> str:
    """A row for each model type that works with a head at least."""
    lines = [
        "| model type | heads | sites | checkpointing | packed rows | remarks |",
        "|---|---|---|---|---|---|",
    ]
    for kind, all_rows in by_type(records).items():
        rows = good(all_rows)
        if rows:
            heads = ", ".join(dict.fromkeys(HEADS[head] for head, _ in rows))
            sites = ", ".join(f"`{site}`" for site in dict.fromkeys(site for _, made in rows for site in made["sites"]))
            parts = " | ".join(answer(rows, part) for part in ("checkpointing", "packed"))
            lines.append(f"| {kind} | {heads} | {sites} | {parts} | {remarks(rows)} |")
    return "\n".join(lines)


def table_of_others(records: Records, outcomes: tuple[str, ...]) -> str:
    """Model types of which no head works and one at least has one of these outcomes; what is said of them."""
    reasons: dict[str, list[str]] = {}
    for kind, rows in by_type(records).items():
        found = [made for _, made in rows if made["outcome"] in outcomes]
        if found and not good(rows) and (outcomes != ("unbuilt",) or len(found) == len(rows)):
            reasons.setdefault(found[0]["reason"], []).append(kind)
    lines = ["| model types | reason |", "|---|---|"]
    lines += [
        f"| {', '.join(kinds)} | {cell(reason)} |" for reason, kinds in sorted(reasons.items(), key=lambda x: x[1])
    ]
    return "\n".join(lines)


def table_of_counts(records: Records) -> str:
    """How many heads and model types each outcome has."""
    types = by_type(records).values()
    texts = {"same": "works", "refused": "refused", "raised": "fails in training", "unbuilt": "not tried"}
    texts |= {made["outcome"]: made["outcome"] for made in records.values() if made["outcome"] not in texts}
    lines = ["| | model types | models with a head |", "|---|---|---|"]
    order = list(texts)
    for outcome, text in texts.items():
        kinds = sum(min((made["outcome"] for _, made in rows), key=order.index) == outcome for rows in types)
        heads = sum(made["outcome"] == outcome for made in records.values())
        lines.append(f"| {text} | {kinds} | {heads} |")
    return "\n".join(lines)


def tables(records: Records) -> dict[str, str]:
    """The tables of the page."""
    return {
        "counts": table_of_counts(records),
        "works": table_of_good(records),
        "refused": table_of_others(records, ("refused", "raised", "differs", "idle")),
        "not tried": table_of_others(records, ("unbuilt",)),
    }


if __name__ == "__main__":
    if sys.argv[1:]:
        write_records(try_models(sys.argv[1:]))
    write_text(PAGE, filled(PAGE.read_text(encoding="utf-8"), tables(read_records())))
