"""Train or fine-tune a Marian translator with any attention regularizer; see README.md."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import sacrebleu
from datasets import Dataset, DatasetDict, load_dataset
from text_classification import callbacks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from attn_reg_plugin.corpora.phrasebook import splits


@dataclass
class Arguments:
    """Beside these, every flag of Seq2SeqTrainingArguments."""

    data: str = field(default="phrasebook", metadata={"help": "folder with train.LANG and valid.LANG, or phrasebook"})
    dataset: list[str] = field(default_factory=list, metadata={"help": "instead: a hub dataset, e.g. wmt16 ro-en"})
    pair: list[str] = field(default_factory=lambda: ["en", "ro"], metadata={"help": "source and target language"})
    limit: int = field(default=0, metadata={"help": "training pairs; 0 = all there are, 4,000 of the phrasebook"})
    model: str = field(default="", metadata={"help": "folder or hub name; default: a small Marian, random weights"})
    width: int = field(default=128, metadata={"help": "of the small Marian; it has 2 + 2 layers"})
    vocabulary: int = field(default=2000, metadata={"help": "pieces of its tokenizer, at most"})
    method: str = field(default="none", metadata={"help": "none, ad_drop, attend_out, ..."})
    options: list[str] = field(default_factory=list, metadata={"help": "of the method: p=0.3 q=0.3 cross_tuning=off"})


def read(arguments: Arguments) -> DatasetDict:
    """Splits `train` and `validation` with the columns `source` and `target`."""
    source, target = arguments.pair
    if arguments.dataset:
        found = load_dataset(*arguments.dataset)
        rows = {split: found[split]["translation"] for split in ("train", "validation")}
        pairs = {split: [(row[source], row[target]) for row in rows[split]] for split in rows}
    elif arguments.data == "phrasebook":
        made = splits(arguments.limit or 4000, 200, 1)
        names = {"train": "train", "validation": "valid"}
        pairs = {s: [(getattr(t, source), getattr(t, target)) for t in made[name]] for s, name in names.items()}
    else:
        read_text = lambda split, side: Path(arguments.data, f"{split}.{side}").read_text("utf-8")  # noqa: E731
        lines = lambda split, side: read_text(split, side).removesuffix("\n").split("\n")  # noqa: E731
        names = {"train": "train", "validation": "valid"}
        pairs = {s: list(zip(lines(n, source), lines(n, target), strict=True)) for s, n in names.items()}
    pairs["train"] = pairs["train"][: arguments.limit or None]
    sides = {split: {"source": [s for s, _ in rows], "target": [t for _, t in rows]} for split, rows in pairs.items()}
    return DatasetDict({split: Dataset.from_dict(columns) for split, columns in sides.items()})


def from_scratch(data: DatasetDict, arguments: Arguments) -> tuple[MarianMTModel, PreTrainedTokenizerFast]:
    """A small Marian and a tokenizer of byte pairs, learnt from the training text."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    learner = trainers.BpeTrainer(vocab_size=arguments.vocabulary, special_tokens=["</s>", "<unk>", "<pad>"])
    pieces.model.unk_token = "<unk>"
    pieces.train_from_iterator([*data["train"]["source"], *data["train"]["target"]], learner)
    pieces.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", model_max_length=128
    )
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 2 * arguments.width}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    special = {"pad_token_id": 2, "eos_token_id": 0, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    config = MarianConfig(
        vocab_size=len(tokenizer), d_model=arguments.width, max_position_embeddings=128, dropout=0.1, **sides, **special
    )
    return MarianMTModel(config), tokenizer


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate; the metrics."""
    arguments, training = HfArgumentParser((Arguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses(argv)
    training.predict_with_generate = True
    set_seed(training.seed)
    data = read(arguments)
    if arguments.model:
        model, tokenizer = (kind.from_pretrained(arguments.model) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    else:
        model, tokenizer = from_scratch(data, arguments)
    references = data["validation"]["target"]

    def scores(predicted) -> dict[str, float]:
        ids = predicted.predictions.clip(min=0)  # padded by -100
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        judges = {"bleu": sacrebleu.corpus_bleu, "chrf": sacrebleu.corpus_chrf}
        return {name: judge(texts, [list(references)]).score for name, judge in judges.items()}

    encode = lambda rows: tokenizer(rows["source"], text_target=rows["target"], truncation=True)  # noqa: E731
    data = data.map(encode, batched=True, remove_columns=["source", "target"])
    trainer = Seq2SeqTrainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
        compute_metrics=scores,
        callbacks=callbacks(arguments.method, arguments.options),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    return trainer.evaluate()


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
