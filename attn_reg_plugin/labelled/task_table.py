"""The labelled tasks as data: files, columns, labels and official metrics. A new GLUE-like task is one row.

Labels are in the official order, that of the data sets on the hub, so an index means the same whichever way an example
came. Metrics are named as in `metrics.py`; the first of a row is the one to choose checkpoints by.

A task of the user's own is in no row: `own_task` makes it of flags.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CLASSIFICATION, REGRESSION, TAGGING, MULTIPLE_CHOICE = "classification", "regression", "tagging", "multiple_choice"
KINDS = (CLASSIFICATION, REGRESSION, TAGGING, MULTIPLE_CHOICE)
FORMATS = ("tsv", "csv", "jsonl", "conll", "conllu")


@dataclass(frozen=True)
class Hub:
    """Where a task is on the Hugging Face hub, and how columns and splits are called there if otherwise than here."""

    path: str
    name: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)


#: fairseq's name of a split, and the hub's
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}


def _files(train: str, valid: str, test: str, **more: str) -> dict[str, tuple[str, ...]]:
    """Name the files of each split, several with spaces between; the first that is there counts."""
    return {split: tuple(names.split()) for split, names in dict(train=train, valid=valid, test=test, **more).items()}


_TSV = _files("train.tsv", "dev.tsv valid.tsv", "test.tsv")


@dataclass(frozen=True)
class LabelledTask:
    """One task.

    Attributes:
        name: what it is called.
        kind: one of `KINDS`.
        text: names of the columns of the text, or of both texts, or of a beginning and its endings. CoNLL files
            have no names: their word column is the first, CoNLL-U's the second.
        label: name of the label's column; of CoNLL files its number from 0 (-1 the last), as text.
        labels: the label set in the official order; empty for regression; None: those of the training file, sorted.
        metrics: the official metrics; empty: those of its kind, once its labels are known.
        format: one of `FORMATS`.
        files: split -> names of its file, the first that is there counts; `.gz` is tried for each.
        headerless: the columns of files that have no header line.
        aliases: other ways in which files write a label.
        bounds: smallest and largest value of a regression.
        fields: how many fields a CoNLL line has; None: as many as the file's first.
        hub: where the hub has it.
        skip_broken: leave out rows with the wrong number of fields, and say how many (QQP's official files have such
            rows); by default they are refused, and always where labels are not needed, for predictions are counted.
        valid_is_test: papers validate on the test set, as there is no other; used where a validation set is missing.
        more_valid: further validation sets and what they are called; nothing is chosen by them.

    Raises:
        ValueError: an unknown kind or format.
    """

    name: str
    kind: str
    text: tuple[str, ...]
    label: str
    labels: tuple[str, ...] | None
    metrics: tuple[str, ...] = ()
    format: str = "tsv"
    files: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _TSV)
    headerless: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None
    fields: int | None = None
    hub: Hub | None = None
    skip_broken: bool = False
    valid_is_test: bool = False
    more_valid: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, value, allowed in (("kind", self.kind, KINDS), ("format", self.format, FORMATS)):
            if value not in allowed:
                raise ValueError(f"task {self.name}: the {what} is {value!r}, but must be one of {', '.join(allowed)}")
        if not self.metrics and self.labels is not None:
            entities = self.kind == TAGGING and {"O"} < {"O", *self.labels} == {"O", *entity_tags(self.labels)}
            usual = _CORRELATIONS if self.kind == REGRESSION else _ENTITIES if entities else ("accuracy",)
            object.__setattr__(self, "metrics", usual)


#: places of a word in an entity, in all the schemes there are
PLACES = "BIESLU"


def entity_tags(labels: Iterable[str]) -> list[str]:
    """List the labels that are a place in an entity and the entity's type, such as `B-PER`."""
    return [label for label in labels if len(label) > 2 and label[0] in PLACES and label[1] == "-"]


_ZERO_ONE, _ENTAILS = ("0", "1"), ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_F1 = ("accuracy_f1", "accuracy", "f1")
_ENTITIES = ("f1", "precision", "recall")
_CORRELATIONS = ("pearson_spearman", "pearson", "spearman")
_PREMISE = {"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"}
_MRPC = {"#1 String": "sentence1", "#2 String": "sentence2", "Quality": "label"}
_MATCHED = {"valid": "validation_matched", "test": "test_matched"}
_MISMATCHED = {"valid1": "validation_mismatched", "test1": "test_mismatched"}
_MISMATCHED_FILES = {"valid1": "dev_mismatched.tsv", "test1": "test_mismatched.tsv"}
_CONLLU = _files("train.conllu *-ud-train.conllu", "dev.conllu *-ud-dev.conllu", "test.conllu *-ud-test.conllu")
_SWAG = ("startphrase", "ending0", "ending1", "ending2", "ending3")
_WORDS = ("tokens",)
#: universal part-of-speech tags, in the alphabetical order of universaldependencies.org
UPOS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM"),
    *("PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)


def bio(*types: str) -> tuple[str, ...]:
    """Make the label set of entity types: O, and B- and I- of each."""
    return ("O", *(f"{place}-{kind}" for kind in types for place in "BI"))


def _glue(
    name: str, text: tuple[str, ...], label: str, labels: tuple[str, ...], metrics: tuple[str, ...] = (), **more: object
) -> LabelledTask:
    """Make a row of GLUE; the hub calls a label `label`."""
    hub = more.pop("hub", None) or Hub("nyu-mll/glue", name, {label: "label"})
    return LabelledTask(name, more.pop("kind", CLASSIFICATION), text, label, labels, metrics, hub=hub, **more)


_ROWS = (
    _glue(
        *("cola", ("sentence",), "label", _ZERO_ONE, ("mcc", "accuracy")),
        headerless=("source", "label", "mark", "sentence"),
    ),
    _glue("sst2", ("sentence",), "label", _ZERO_ONE),
    _glue(
        *("mrpc", ("#1 String", "#2 String"), "Quality", _ZERO_ONE, _F1),
        files=_files("train.tsv msr_paraphrase_train.txt", "dev.tsv", "test.tsv msr_paraphrase_test.txt"),
        hub=Hub("nyu-mll/glue", "mrpc", _MRPC),
    ),
    _glue("qqp", ("question1", "question2"), "is_duplicate", _ZERO_ONE, _F1, skip_broken=True),
    _glue("stsb", _PAIR, "score", (), kind=REGRESSION, bounds=(0.0, 5.0)),
    _glue(
        *("mnli", _PAIR, "gold_label", ("entailment", "neutral", "contradiction")),
        files=_files("train.tsv", "dev_matched.tsv", "test_matched.tsv", **_MISMATCHED_FILES),
        more_valid={"valid1": "mismatched"},
        hub=Hub("nyu-mll/glue", "mnli", _PREMISE, _MATCHED | _MISMATCHED),
    ),
    _glue("qnli", ("question", "sentence"), "label", _ENTAILS),
    _glue("rte", _PAIR, "label", _ENTAILS),
    _glue("wnli", _PAIR, "label", _ZERO_ONE),
    LabelledTask(
        *("paws-x", CLASSIFICATION, _PAIR, "label", _ZERO_ONE, ("accuracy", "f1")),
        files=_files("train.tsv translated_train.tsv", "dev_2k.tsv dev.tsv", "test_2k.tsv test.tsv"),
        hub=Hub("google-research-datasets/paws-x", "en"),
    ),
    LabelledTask(
        *("imdb", CLASSIFICATION, ("text",), "label", ("neg", "pos")),
        aliases={"0": "neg", "1": "pos"},
        hub=Hub("stanfordnlp/imdb", splits={"valid": "test"}),
        valid_is_test=True,
    ),
    LabelledTask(
        *("swag", MULTIPLE_CHOICE, _SWAG, "label", ("0", "1", "2", "3")),
        format="csv",
        files=_files("train.csv", "val.csv valid.csv", "test.csv"),
        hub=Hub("allenai/swag", "regular"),
    ),
    LabelledTask(
        *("wnut17", TAGGING, _WORDS, "-1"),
        bio("corporation", "creative-work", "group", "location", "person", "product"),
        format="conll",
        fields=2,
        files=_files(
            "wnut17train.conll train.conll", "emerging.dev.conll dev.conll", "emerging.test.annotated test.conll"
        ),
        hub=Hub("leondz/wnut_17", None, {"-1": "ner_tags"}),
    ),
    LabelledTask(
        *("conll2003", TAGGING, _WORDS, "3", bio("PER", "ORG", "LOC", "MISC")),
        format="conll",
        fields=4,
        files=_files("eng.train train.txt", "eng.testa valid.txt", "eng.testb test.txt"),
        hub=Hub("lhoestq/conll2003", None, {"3": "ner_tags"}),
    ),
    LabelledTask(
        *("upos", TAGGING, _WORDS, "3", UPOS),
        format="conllu",
        files=_CONLLU,
        hub=Hub("universal-dependencies/universal_dependencies", "en_ewt", {"3": "upos"}),
    ),
    # of the user's own licensed files: the word and its tag are the first two columns, whatever follows
    LabelledTask(
        *("ptb", TAGGING, _WORDS, "1", None),
        format="conll",
        files=_files("train.conll train.txt", "valid.conll dev.conll valid.txt dev.txt", "test.conll test.txt"),
    ),
    LabelledTask("xpos", TAGGING, _WORDS, "4", None, format="conllu", files=_CONLLU),
)

#: name -> task
TASKS: dict[str, LabelledTask] = {row.name: row for row in _ROWS}


def find_task(name: str) -> LabelledTask:
    """The row of a task; a ValueError lists those there are."""
    if name not in TASKS:
        own = f"and of files of your own {', '.join(KINDS)}"
        raise ValueError(f"unknown labelled task {name!r}; the tasks are: {', '.join(TASKS)}, {own}")
    return TASKS[name]


def own_task(
    kind: str,
    text_columns: str = "",
    label_column: str = "",
    labels: str = "",
    file_format: str = "",
    data: str | Path = "",
) -> LabelledTask:
    """Make a task of the user's own of flags; lists are written with commas.

    Args:
        kind: one of `KINDS`.
        text_columns: of the text, of both texts, or of a beginning and its endings; not needed for tagging.
        label_column: by default `label`; of CoNLL files its number, by default the last, of CoNLL-U UPOS.
        labels: the label set; by default that of the training file, sorted. In multiple choice they name the endings in
            their order, by default from 0.
        file_format: one of `FORMATS`; by default that of the training file in `data`.
        data: the folder with `train`, `valid` (or `dev`) and `test`, such as `train.csv`.

    Raises:
        ValueError: flags that say too little or contradict each other.
    """
    text, label_set = map(_parts, (text_columns, labels))
    tagging, name = kind == TAGGING, kind.replace("_", " ")
    allowed = {MULTIPLE_CHOICE: "3 or more", TAGGING: "1"}.get(kind, "1 or 2")
    if not {MULTIPLE_CHOICE: len(text) > 2, TAGGING: len(text) < 2}.get(kind, 0 < len(text) < 3):
        raise ValueError(f"{name} has {allowed} --text-columns, not {len(text)} ({', '.join(text)})")
    text = text or _WORDS
    if data and not Path(data).is_dir():
        raise ValueError(f"{data} is no folder; give the one with your files")
    if not file_format:
        names = [f"train.{name}{end}" for name in FORMATS if name.startswith("conll") == tagging for end in ("", ".gz")]
        found = next((name for name in names if data and (Path(data) / name).is_file()), "train.conll" * tagging)
        if not found:
            raise ValueError(f"{data or '--data'} has no training file; it must be one of {', '.join(names[::2])}")
        file_format = found.split(".")[1]
    if tagging != file_format.startswith("conll"):
        raise ValueError(f"--file-format {file_format} is not for {name}")
    if kind == REGRESSION and label_set:
        raise ValueError(f"--labels {labels} is not for regression, whose labels are numbers")
    if "" in label_set or len(set(label_set)) < len(label_set):
        raise ValueError(f"--labels {labels} must be different labels with commas between")
    known: tuple[str, ...] | None = label_set or None
    if kind == MULTIPLE_CHOICE:
        known = known or tuple(str(number) for number in range(len(text) - 1))
        if len(known) != len(text) - 1:
            raise ValueError(
                f"{name} needs a label for each of its {len(text) - 1} endings, not {len(known)} ({', '.join(known)})"
            )
    files = _files(f"train.{file_format}", f"valid.{file_format} dev.{file_format}", f"test.{file_format}")
    label = label_column or ("3" if file_format == "conllu" else "-1" if tagging else "label")
    if label in text or len(set(text)) < len(text):
        raise ValueError(f"--text-columns {text_columns}: each must be another column, and none the label's, {label}")
    known = () if kind == REGRESSION else known
    return LabelledTask("own", kind, text, label, known, format=file_format, files=files)


def _parts(flag: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in flag.split(",")) if flag else ()


def flags_of(task: LabelledTask) -> dict[str, str | bool]:
    """Give the flags of `fairseq-train` that describe a task: its name, or those of a task of the user's own."""
    if task.name in TASKS:
        return {"labelled": task.name}
    found: dict[str, str | bool] = {"label-column": task.label, "file-format": task.format}
    found |= {"text-columns": ",".join(task.text)}
    labels = ",".join(task.labels or ())  # those of a training file that have commas are collected again
    found |= {"labels": labels} if labels and _parts(labels) == task.labels else {}
    return found | ({"regression": True} if task.kind == REGRESSION else {})
