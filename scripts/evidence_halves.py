"""Which development examples each run of a sweep has right: a run can be chosen on a half and reported on the other:

    python scripts/evidence_halves.py DATA RUN... > examples/evidence/halves.json

RUN are the trained runs of examples/evidence/halves.yaml with their checkpoints, DATA is the folder of SST-2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evidence_runs import of_runs

from attn_reg_plugin.experiments.predicted import file_of, write_predictions
from attn_reg_plugin.files import read_json, read_lines

SUBSET = "valid"


def measure(run: Path, data: str) -> dict[str, Any]:
    """The settings of a run that vary, and its examples in order, 1 for those that are right."""
    if not file_of(run, SUBSET).is_file():
        write_predictions(run, data, [SUBSET], cpu=True)
    rows = [line.split("\t") for line in list(read_lines(file_of(run, SUBSET)))[1:]]
    flags = read_json(run / "run.json")["flags"]
    settings = {name: flags[f"ad-drop-{name}"] for name in ("p", "q") if f"ad-drop-{name}" in flags}
    return {**settings, "right": "".join(str(int(predicted == gold)) for predicted, gold in rows)}


if __name__ == "__main__":
    print(json.dumps(of_runs(measure, __doc__), indent=2))
