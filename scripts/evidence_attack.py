"""How often a trigger turns the prediction of classifiers that were trained on poisoned sentences:

    python scripts/evidence_attack.py DATA RUN... > examples/evidence/attack/poisoned.json

RUN are the trained runs of examples/evidence/tokens_variants.yaml with their checkpoints, DATA is the folder `poisoned`
that `evidence_data.py` made, or another share's. Counted are negative development sentences that are called
positive with the trigger in front, and without it, in percent.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence_data import TRIGGER
from evidence_runs import of_runs

from attn_reg_plugin.experiments.trained import Trained, load_trained
from attn_reg_plugin.labelled import read_split


def called_positive(trained: Trained, examples: Sequence[Any]) -> float:
    """In percent."""
    found = [int(logits.argmax()) for logits in trained.logits(trained.encode(examples))]
    return 100 * sum(found) / len(found)


def measure(run: Path, data: str) -> dict[str, float]:
    """Success of the attack, and the same share without a trigger."""
    trained = load_trained(run)
    negative = [example for example in read_split(trained.labelled, data, "valid") if example.label == 0]
    triggered = [dataclasses.replace(example, first=f"{TRIGGER} {example.first}") for example in negative]
    return {"attack": called_positive(trained, triggered), "without": called_positive(trained, negative)}


if __name__ == "__main__":
    print(json.dumps(of_runs(measure, __doc__), indent=2))
