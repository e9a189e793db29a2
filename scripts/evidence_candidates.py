"""How often AD-DROP's candidates hit a planted word, and how much of the attention is on it:

    python scripts/evidence_candidates.py DATA RUN... > examples/evidence/candidates.json

RUN are trained runs of `attn-reg finetune --shortcut X` with their checkpoints, DATA their folder. Each development
example gets the planted word of its label. Counted are attention rows with any attribution: in the last layer of a
classifier these are the rows of the first token, all others are ties.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from attn_reg_plugin.attention.masks import candidate_region
from attn_reg_plugin.experiments.probe_lens import AttentionMap, looking
from attn_reg_plugin.experiments.probe_subjects import Wanted, load_subject
from attn_reg_plugin.experiments.run_settings import flags_of
from attn_reg_plugin.files import read_json
from attn_reg_plugin.labelled import find_task, read_split

EXAMPLES, RATIO = 100, 0.3
#: positions of `[CLS] planted w w w [SEP]`
KINDS = {"planted": 1, "first": 0, "last": -1}
#: what is counted of each kind
FIGURES = ("candidates", "weighted_candidates", "attention")


def planted_words(run: Path) -> list[str]:
    """The words of a run, in the order of the label set."""
    return flags_of(read_json(run / "run.json")["flags"])["--shortcut-words"].split(",")


def of_map(found: AttentionMap) -> Iterator[tuple[str, list[float]]]:
    """Of each kind of position, over rows: how often it is a candidate by ∂F/∂A and by A ⊙ ∂F/∂A, and its attention."""
    rows = found.attribution[0].flatten(0, 1).abs().sum(-1) > 0
    maps = [
        candidate_region(found.attribution, found.valid, RATIO, "high"),
        candidate_region(found.attention * found.attribution, found.valid, RATIO, "high"),
        found.attention,
    ]
    chosen = [one[0].flatten(0, 1)[rows].double() for one in maps]
    for kind, place in KINDS.items():
        yield kind, [float(one[:, place].mean()) for one in chosen]
    yield "other", [float(one[:, 2:-1].mean()) for one in chosen]


def measure(run: Path, data: str) -> dict[str, list[dict[str, float]]]:
    """By kind of position, a row for each layer."""
    subject = load_subject(run, Wanted(data, examples=0, cpu=True))
    task, words = find_task("sst2"), planted_words(run)
    found: dict[str, dict[int, list[list[float]]]] = {}
    with looking(subject.model) as lens:
        for example in read_split(task, data, "valid")[:EXAMPLES]:
            sample = subject.sentence([f"{words[int(example.label)]} {example.first}"])
            for seen in lens.look(subject, sample):
                for kind, figures in of_map(seen):
                    found.setdefault(kind, {}).setdefault(seen.site.layer, []).append(figures)
    means = {
        kind: [torch.tensor(layers[layer]).mean(0).tolist() for layer in sorted(layers)]
        for kind, layers in found.items()
    }
    return {kind: [dict(zip(FIGURES, layer, strict=True)) for layer in layers] for kind, layers in means.items()}


def main(data: str, runs: Sequence[str]) -> None:
    """Measure and print."""
    measured = {Path(run).name: measure(Path(run), data) for run in runs}
    print(json.dumps({"p": RATIO, "examples": EXAMPLES, "runs": measured}, indent=2))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
