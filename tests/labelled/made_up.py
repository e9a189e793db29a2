"""Made-up labelled text in each task's official format, and encoders with random weights: to try a configuration out.

Nothing is downloaded, and nothing is learned from it beyond that every part works.
"""

import csv
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from attn_reg_plugin.labelled.task_table import MULTIPLE_CHOICE, REGRESSION, TAGGING, LabelledTask, find_task

#: words of the made-up texts
WORDS = [f"w{number}" for number in range(24)]
#: sizes of an encoder
SHAPE = {
    "vocab_size": 4 + len(WORDS) + 2,  # with the special tokens and the endings
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
#: as many layers and positions as the papers' models have, so that their sites and lengths exist, and little else
PAPER_SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 520,
}
#: part of a model's name, in small letters -> its family in transformers; any other is a BERT
FAMILIES = {"roberta": "Roberta", "electra": "Electra"}
#: examples of each split
SIZES = {"train": 50, "valid": 20, "valid1": 20, "test": 20, "test1": 20}
#: for tasks that take their labels from the training file
_PENN = ("NN", "VB", "DT", "IN", "JJ")


def tokenizer(types: bool = True) -> Any:
    """Whole words and two endings (`w1x` is `w1` and `##x`), with `[CLS] first [SEP] second [SEP]`.

    Returns:
        a `transformers.PreTrainedTokenizerFast`.
    """
    from tests.labelled.tokenizers import SPECIAL, bert_tokenizer

    inputs = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    return bert_tokenizer([*SPECIAL, *WORDS, "##x", "##y"], model_input_names=inputs)


def make_encoder(folder: Path, family: str = "Bert", seed: int = 1, types: bool = True, **options: Any) -> Path:
    """A pretrained encoder as far as anybody can tell: weights, configuration and tokenizer in a folder.

    Args:
        family: as in `BertConfig`.
        types: whether the tokenizer makes token types.
        **options: of the configuration, over `SHAPE`.
    """
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **options})
    getattr(transformers, f"{family}Model")(config).save_pretrained(folder)
    tokenizer(types).save_pretrained(folder)
    return folder


def family_of(model: str) -> str:
    """The family of a model of this name, see `FAMILIES`."""
    return next((family for part, family in FAMILIES.items() if part in model.lower()), "Bert")


def make_task(folder: Path, name: str, sizes: dict[str, int] | None = None, seed: int = 1) -> Path:
    """Write files of a task with made-up examples, labels in turn; `sizes` of splits hold over `SIZES`."""
    task, generator = find_task(name), random.Random(seed)
    for split, size in {**SIZES, **(sizes or {})}.items():
        if split not in task.files:
            continue
        if task.kind == TAGGING:
            # the first name without a wildcard is one that readers look for
            file = next(one for one in task.files[split] if "*" not in one)
            _write(folder / file, _sentences(task, size, generator))
        else:
            _write_table(folder / task.files[split][0], task, size, generator)
    return folder


def make_text(generator: random.Random, longest: int = 9, first: int | None = None) -> str:
    """At most `longest` words, some with an ending; `first` is the number of the first word, None draws it."""
    words = [generator.choice(WORDS) for _ in range(generator.randint(2, longest))]
    words = words if first is None else [WORDS[first % len(WORDS)], *words[1:]]
    return " ".join(word + generator.choice(["", "", "x"]) for word in words)


def _write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _write_table(path: Path, task: LabelledTask, size: int, generator: random.Random) -> None:
    """A table of texts and labels; the first word of a text follows from the label."""
    columns = list(task.headerless) or ["index", *task.text, task.label]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, delimiter="," if task.format == "csv" else "\t", lineterminator="\n")
        if not task.headerless:
            rows.writerow(columns)
        for number in range(size):
            values = _row(task, number, generator)
            rows.writerow([values.get(column, f"{column}{number % 3}") for column in columns])


def _row(task: LabelledTask, number: int, generator: random.Random) -> dict[str, str]:
    if task.kind == REGRESSION:
        low, high = task.bounds or (0.0, 1.0)
        label = f"{low + (high - low) * (number % 6) / 5:.3f}"
    else:
        label = (task.labels or ())[number % len(task.labels or ())]
    values = {column: make_text(generator, first=number % 6) for column in task.text}
    if task.kind == MULTIPLE_CHOICE:  # the right ending begins as the beginning does
        start, *endings = task.text
        right = endings[(task.labels or ()).index(label)]
        for ending in endings:
            values[ending] = make_text(generator, first=number % 6 if ending == right else None)
        values[start] = make_text(generator, first=number % 6)
    return {"index": str(number), **values, task.label: label}


def _sentences(task: LabelledTask, size: int, generator: random.Random) -> Iterable[str]:
    """Lines of a file of tagged words; a word's tag follows from its number."""
    tags = [label for label in task.labels or _PENN if not label.startswith("I-")]
    for _ in range(size):
        words = make_text(generator).split()
        for place, word in enumerate(words, start=1):
            tag = tags[int(word.strip("wxy")) % len(tags)]
            if task.format == "conllu":
                fields = [str(place), word, word, "_", "_", "_", "0", "dep", "_", "_"]
                fields[int(task.label)] = tag
                yield "\t".join(fields)
            else:
                yield " ".join([word, *["_"] * ((task.fields or 2) - 2), tag]) if task.fields != 2 else f"{word}\t{tag}"
        yield ""
