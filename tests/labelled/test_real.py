"""The real corpora beside the repository: as many examples as their README counts."""

from pathlib import Path

import pytest

from attn_reg_plugin.labelled import find_task, read_split

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
COUNTS = [
    ("cola", "glue/CoLA", {"train": 8535, "valid": 1043}),
    ("rte", "glue/RTE", {"train": 2490, "valid": 277}),
    ("mrpc", "glue/MRPC", {"train": 3668, "valid": 408}),
    ("stsb", "glue/STS-B", {"train": 5738, "valid": 1500}),
    ("sst2", "glue/SST-2", {"train": 66342, "valid": 872}),
    ("qnli", "glue/QNLI", {"train": 9999, "valid": 5463}),
    ("qqp", "glue/QQP", {"train": 8999, "valid": 1000}),
    ("mnli", "glue/MNLI", {"train": 9988, "valid": 9815}),
    ("paws-x", "paws-x/en", {"valid": 2000, "test": 1994}),
    ("paws-x", "paws-x/de", {"valid": 1932, "test": 1968}),
    ("imdb", "imdb", {"train": 2200, "test": 1400}),
    ("wnut17", "wnut17", {"train": 3394, "valid": 1009, "test": 1287}),
    ("upos", "ud-english-ewt", {"valid": 2001, "test": 2077}),
]


@pytest.mark.parametrize(("name", "folder", "counts"), COUNTS)
def test_counts(name: str, folder: str, counts: dict[str, int]) -> None:
    if not (DATA / folder).is_dir():
        pytest.skip(f"no {DATA / folder}")
    task = find_task(name)
    for split, count in counts.items():
        examples = read_split(task, DATA / folder, split)
        assert len(examples) == count
        if task.labels and name != "wnut17":
            used = {label for e in examples for label in (e.labels if task.kind == "tagging" else [e.label])}
            assert used == set(range(len(task.labels)))
