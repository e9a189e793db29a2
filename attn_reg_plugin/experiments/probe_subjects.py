"""What `attn-reg probe` looks into: a fairseq run of an encoder or a translator, or a folder of transformers'."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_reg_plugin.checkpoints import find_checkpoint, load_checkpoint
from attn_reg_plugin.experiments.data_folder import raw_lines
from attn_reg_plugin.experiments.probe_lens import Measured, Subject
from attn_reg_plugin.experiments.trained import Trained, load_trained
from attn_reg_plugin.labelled import (
    IGNORED,
    MULTIPLE_CHOICE,
    REGRESSION,
    TAGGING,
    Example,
    LabelledTask,
    TaggedSentence,
    TextExample,
    find_task,
    load_tokenizer,
    longest_input,
    read_split,
    sample_of,
    with_labels,
)
from attn_reg_plugin.labelled.dataset import LabelledDataset
from attn_reg_plugin.regularizers.ad_drop.objectives import logits_of

#: what the loss is the mean of, by kind of task
_UNITS = {TAGGING: "word"}
_PIECE = "target piece"


@dataclass(frozen=True)
class Wanted:
    """What is to be probed.

    Attributes:
        data: the folder of labelled files or of a parallel corpus, or `hub`.
        split: of it.
        examples: how many, drawn at random; 0: all.
        batch_size: examples at once.
        task: of labelled text, where a folder of transformers' does not say it.
        tokenizer: the folder of the tokenizer, where it isn't beside the model.
        cpu: stay on the CPU.
        seed: of the examples drawn.
    """

    data: str
    split: str = "valid"
    examples: int = 200
    batch_size: int = 32
    task: str | None = None
    tokenizer: Path | None = None
    cpu: bool = True
    seed: int = 1

    @property
    def device(self) -> str:
        """Where the model is run."""
        return "cpu" if self.cpu or not torch.cuda.is_available() else "cuda"


def load_subject(run: Path, wanted: Wanted) -> Subject:
    """The model of a run and the examples to probe it with.

    Raises:
        FileNotFoundError: there is no run, no checkpoint in it, or no data.
        ValueError: the run or the data isn't of a kind that is known, or they do not fit.
    """
    from attn_reg_plugin.huggingface.trained_folders import model_folder

    if not run.exists():
        raise FileNotFoundError(f"there is no run {run}")
    folder = model_folder(run) if run.is_dir() else None
    if folder is not None:
        return _of_folder(folder, wanted)
    path = find_checkpoint(run)
    settings = (load_checkpoint(path).get("cfg") or {}).get("model")
    encoder = settings.get("hf_config") if isinstance(settings, dict) else getattr(settings, "hf_config", None)
    return _labelled(load_trained(path, wanted.device == "cpu"), wanted) if encoder else _translation(path, wanted)


def checkpoints_of(run: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run by epoch (fairseq's `checkpointN.pt`) or update (Trainer's `checkpoint-N`).

    Raises:
        ValueError: there are not two of them.
    """
    places = [run, run / "checkpoints"]
    names = [
        (path, path.name.removeprefix("checkpoint").removesuffix(".pt")) for p in places for path in p.glob("*.pt")
    ]
    names += [(path, path.name.removeprefix("checkpoint-")) for path in run.glob("checkpoint-*") if path.is_dir()]
    found = sorted((int(number), path) for path, number in names if number.isdecimal())
    if len(found) < 2:
        raise ValueError(
            f"{run} has {len(found)} checkpoints by epoch, but a curve needs 2: checkpointN.pt, as fairseq-train "
            "writes them without --no-epoch-checkpoints, or checkpoint-N of Trainer"
        )
    return found


# -- labelled text --------------------------------------------------------------------------------------------------


def _of_folder(folder: Path, wanted: Wanted) -> Subject:
    """A model of transformers' on labelled text or a parallel corpus."""
    from attn_reg_plugin.huggingface.trained_folders import load_classifier
    from attn_reg_plugin.models.hf_encoder import HFEncoderModel, load_config

    if load_config(str(folder)).is_encoder_decoder and wanted.task is None:
        return _sequence_to_sequence(folder, wanted)
    if wanted.task is None:
        raise ValueError(f"{folder} does not say what its labels mean; name the task of the data by --task")
    labelled = find_task(wanted.task)
    if labelled.kind != REGRESSION:
        labelled = with_labels(labelled, wanted.data)
    model = load_classifier(folder, labelled.kind)
    labelled = _in_order_of(model.config, labelled, folder)
    tokenizer = load_tokenizer(str(wanted.tokenizer or folder), labelled)
    longest = longest_input(tokenizer, model.config)
    encoder = HFEncoderModel(model).to(wanted.device).eval()
    return _labelled(Trained(encoder, tokenizer, labelled, longest, folder), wanted)


def _in_order_of(config: Any, labelled: LabelledTask, folder: Path) -> LabelledTask:
    """The task with its labels in the model's order, where the model names them.

    Raises:
        ValueError: the model has other labels, or another number of them.
    """
    if labelled.kind in (REGRESSION, MULTIPLE_CHOICE):
        return labelled
    labels = labelled.labels or ()
    names = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    if len(names) != len(labels):
        raise ValueError(f"{folder} has {len(names)} labels, but task {labelled.name} has {len(labels)}")
    if set(names) == set(labels):
        return dataclasses.replace(labelled, labels=names)
    if any(not name.startswith("LABEL_") for name in names):
        raise ValueError(f"{folder} has the labels {', '.join(names)}, but task {labelled.name} {', '.join(labels)}")
    return labelled


def _labelled(trained: Trained, wanted: Wanted) -> Subject:
    """An encoder with its head on labelled text."""
    from attn_reg_plugin.criterions.classification import ClassificationCriterion
    from attn_reg_plugin.criterions.tagging import TaggingCriterion

    task = trained.labelled
    examples = read_split(task, wanted.data, wanted.split)
    drawn = sample_of(examples, wanted.examples, wanted.seed) if wanted.examples else list(examples)
    tagging, regression = task.kind == TAGGING, task.kind == REGRESSION
    criterion = (TaggingCriterion if tagging else ClassificationCriterion)(SimpleNamespace(labelled=task))

    def measure(outputs: Any, sample: dict[str, Any]) -> Measured:
        logits, target = logits_of(outputs).float(), sample["target"]
        right = None if regression else torch.eq(*criterion.predictions(logits, target).unbind(-1))
        return Measured(criterion.losses(logits, target), right)

    def tokens(sample: dict[str, Any], row: int) -> Mapping[str, list[str]]:
        ids = sample["net_input"]["input_ids"].flatten(0, -2)[row].tolist()
        return {"encoder": trained.tokenizer.convert_ids_to_tokens(ids)}

    def sentence(which: int | Sequence[str]) -> dict[str, Any]:
        example = _numbered(examples, which, wanted) if isinstance(which, int) else _example(task, which)
        (sample,) = _samples(trained, [example], wanted)
        return sample

    return Subject(
        model=trained.model,
        samples=list(_samples(trained, drawn, wanted)),
        measure=measure,
        tokens=tokens,
        unit=_UNITS.get(task.kind, "example"),
        score=None if regression else "accuracy",
        targets=tagging or regression,
        title=f"{task.name}, {wanted.split}",
        sentence=sentence,
    )


def _samples(trained: Trained, examples: Sequence[Example], wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Batches of examples of like length."""
    rows = trained.encode(examples, wanted.split)
    dataset = LabelledDataset(rows, trained.labelled.kind, trained.tokenizer)
    order = dataset.ordered_indices()
    for chosen in np.array_split(order, range(wanted.batch_size, len(order), wanted.batch_size)):
        yield on_device(dataset.collater([dataset[index] for index in chosen]), wanted.device)


def _numbered(examples: Sequence[Any], number: int, wanted: Wanted) -> Any:
    if not 1 <= number <= len(examples):
        raise ValueError(f"--sentence is {number}, but {wanted.split} has the examples 1 to {len(examples)}")
    return examples[number - 1]


def _example(task: LabelledTask, texts: Sequence[str]) -> Example:
    """A text of the user's own, without a label.

    Raises:
        ValueError: the task takes another number of texts, or needs a label.
    """
    if task.kind == TAGGING and len(texts) == 1:
        return TaggedSentence(1, tuple(texts[0].split()))
    if task.kind in (REGRESSION, MULTIPLE_CHOICE):
        raise ValueError(
            f"--text has no label, which task {task.name} needs; give --sentence, the number of an example"
        )
    if len(texts) != len(task.text):
        raise ValueError(f"--text was given {len(texts)} texts, but an input of task {task.name} has {len(task.text)}")
    return TextExample(1, texts[0], texts[1] if len(texts) > 1 else None)


# -- translation ----------------------------------------------------------------------------------------------------


def _translation(path: Path, wanted: Wanted) -> Subject:
    """A fairseq translator on a binarized corpus."""
    from attn_reg_plugin.tasks.trained_translation import load_translation, pieces, read_pairs

    root = Path(wanted.data)
    model, task = load_translation(path, root / "bin" if (root / "bin").is_dir() else root)
    dataset, chosen = read_pairs(task, wanted.split, wanted.examples or None, wanted.seed)
    padding = task.target_dictionary.pad()

    def batch(numbers: Sequence[int]) -> dict[str, Any]:
        return on_device(dataset.collater([dataset[int(number)] for number in numbers]), wanted.device)

    def tokens(sample: dict[str, Any], row: int) -> Mapping[str, list[str]]:
        inputs = sample["net_input"]
        return {
            "encoder": pieces(task.source_dictionary, inputs["src_tokens"][row].tolist()),
            # the decoder's row t reads the piece before and writes the piece t
            "decoder": pieces(task.target_dictionary, inputs["prev_output_tokens"][row].tolist()),
        }

    def sentence(which: int | Sequence[str]) -> dict[str, Any]:
        if not isinstance(which, int):
            raise ValueError("--text needs a target as well, which a translator has none of; give --sentence")
        return batch([_numbered(range(len(dataset)), which, wanted)])

    count = max(1, wanted.batch_size)
    return Subject(
        model=model.to(wanted.device).eval(),
        samples=[batch(chosen[start : start + count]) for start in range(0, len(chosen), count)],
        measure=partial(_of_pieces, padding=padding),
        tokens=tokens,
        unit=_PIECE,
        score="accuracy of the next piece",
        targets=False,
        title=f"{task.cfg.source_lang} → {task.cfg.target_lang}, {wanted.split}",
        sentence=sentence,
    )


def _of_pieces(outputs: Any, sample: dict[str, Any], padding: int) -> Measured:
    """The loss of every target piece, padding left out."""
    logits, target = logits_of(outputs).float(), sample["target"]
    losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none", ignore_index=padding)
    real = target != padding
    return Measured(losses[real], (logits.argmax(-1) == target)[real])


def _sequence_to_sequence(folder: Path, wanted: Wanted) -> Subject:
    """A translator of transformers' on the raw lines of a corpus."""
    from attn_reg_plugin.huggingface.trained_folders import load_translator

    model, tokenizer = load_translator(folder, wanted.tokenizer or folder)
    pairs = read_raw_pairs(Path(wanted.data), wanted.split)
    chosen = np.random.default_rng(wanted.seed).permutation(len(pairs))[: wanted.examples or len(pairs)]

    def batch(those: Sequence[tuple[str, str]]) -> dict[str, Any]:
        sources, targets = zip(*those, strict=True)
        made = tokenizer(list(sources), text_target=list(targets), padding=True, truncation=True, return_tensors="pt")
        labels = made["labels"].masked_fill(made["labels"] == tokenizer.pad_token_id, IGNORED)
        inputs = {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"], "labels": labels}
        return on_device({"net_input": inputs, "target": labels}, wanted.device)

    def tokens(sample: dict[str, Any], row: int) -> Mapping[str, list[str]]:
        labels = sample["target"][row]
        written = labels.masked_fill(labels == IGNORED, tokenizer.pad_token_id).tolist()
        source = tokenizer.convert_ids_to_tokens(sample["net_input"]["input_ids"][row].tolist())
        return {"encoder": source, "decoder": ["<start>", *tokenizer.convert_ids_to_tokens(written)[:-1]]}

    def sentence(which: int | Sequence[str]) -> dict[str, Any]:
        if isinstance(which, int):
            return batch([_numbered(pairs, which, wanted)])
        if len(which) != 2:
            raise ValueError(f"--text was given {len(which)} texts, but a translator needs a source and a target")
        return batch([(which[0], which[1])])

    ordered = sorted(chosen.tolist(), key=lambda number: len(pairs[number][0]))
    parts = [ordered[start : start + wanted.batch_size] for start in range(0, len(ordered), wanted.batch_size)]
    return Subject(
        model=model.to(wanted.device).eval(),
        samples=[batch([pairs[number] for number in part]) for part in parts],
        measure=partial(_of_pieces, padding=IGNORED),
        tokens=tokens,
        unit=_PIECE,
        score="accuracy of the next piece",
        targets=False,
        title=f"{Path(wanted.data).name}, {wanted.split}",
        sentence=sentence,
    )


def read_raw_pairs(folder: Path, split: str) -> list[tuple[str, str]]:
    """The sentence pairs of a split: `raw/SPLIT.LANG` of a prepared corpus, source language first.

    Raises:
        FileNotFoundError: there are not two such files.
        ValueError: they differ in length.
    """
    raw = folder / "raw" if (folder / "raw").is_dir() else folder
    trained = sorted((folder / "bin").glob("train.*-*.*.idx"))
    languages = (
        trained[0].name.split(".")[1].split("-")
        if trained
        else sorted(path.suffix[1:] for path in raw.glob(f"{split}.*"))
    )
    if len(languages) != 2 or not all((raw / f"{split}.{language}").is_file() for language in languages):
        raise FileNotFoundError(f"{raw} has no {split}.SOURCE and {split}.TARGET; give a folder of attn-reg prepare")
    sources, targets = (raw_lines(raw / f"{split}.{language}") for language in languages)
    if len(sources) != len(targets):
        raise ValueError(f"{raw}: {split} has {len(sources)} source lines, but {len(targets)} target lines")
    return list(zip(sources, targets, strict=True))


def on_device(value: Any, device: str) -> Any:
    """Tensors, in mappings however deep, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return {name: on_device(held, device) for name, held in value.items()} if isinstance(value, dict) else value
