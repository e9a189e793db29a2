"""The tasks of labelled text, regularized: official files in, encoded by the model's own tokenizer.

    --task attn_reg_text_classification --criterion attn_reg_classification     classes or values of texts, or of pairs
    --task attn_reg_multiple_choice --criterion attn_reg_classification         the right one of several endings
    --task attn_reg_token_classification --criterion attn_reg_tagging           a label for every word

They need no fairseq dictionary. Beside the checkpoints a training keeps the tokenizer and the model's configuration in
a folder `encoder`, so that the checkpoints can be used where the pretrained model is gone.
"""

# no `from __future__ import annotations`: fairseq reads a flag's type from its field, and knows `Optional` only
# ruff: noqa: UP045
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Optional

from fairseq.logging import metrics
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.files import write_text
from attn_reg_plugin.labelled import (
    CLASSIFICATION,
    MULTIPLE_CHOICE,
    REGRESSION,
    TAGGING,
    LabelledTask,
    encode,
    find_task,
    load_tokenizer,
    longest_input,
    with_labels,
)
from attn_reg_plugin.labelled.dataset import LabelledDataset
from attn_reg_plugin.labelled.task_table import own_task
from attn_reg_plugin.models.hf_encoder import check_labels, load_config
from attn_reg_plugin.regularizers.base.distributed import done_by_first_rank, rank
from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, print_flags_if_asked, with_attn_reg
from attn_reg_plugin.tasks.example_flags import TrainingExamples, TrainingExamplesConfig, keep_setting
from attn_reg_plugin.tasks.fairseq_settings import fairseq_setting

logger = logging.getLogger(__name__)

#: the folder beside the checkpoints with the tokenizer and the model's configuration
ENCODER = "encoder"
#: flags that describe a task that is in no table, see `own_task`
_DESCRIBING = ("text_columns", "label_column", "labels", "file_format")
#: kind -> the fairseq task for it
TASKS_OF_KINDS = {
    CLASSIFICATION: "attn_reg_text_classification",
    REGRESSION: "attn_reg_text_classification",
    TAGGING: "attn_reg_token_classification",
    MULTIPLE_CHOICE: "attn_reg_multiple_choice",
}
#: fairseq task -> its kinds, the default one first
KINDS_OF_TASKS = {
    name: tuple(kind for kind, task in TASKS_OF_KINDS.items() if task == name) for name in TASKS_OF_KINDS.values()
}


@dataclass
class LabelledTaskConfig(TrainingExamplesConfig):
    """The flags that all three have."""

    data: str = setting(
        "folder with the official files, or 'hub', 'hub:PATH', 'hub:PATH:NAME' for the datasets hub", MISSING
    )
    hf_model: str = setting("the pretrained encoder and its tokenizer: a folder, or a name on the Hugging Face hub", "")
    labelled: str = setting("which task's files these are, such as rte, stsb, wnut17 or swag; see examples/glue", "")
    text_columns: str = setting("without --labelled: the columns of the texts, separated by commas", "")
    label_column: str = setting("without --labelled: the label's column; of CoNLL files its number, -1 the last", "")
    labels: str = setting("without --labelled: the label set, separated by commas; default: the training file's", "")
    file_format: str = setting("without --labelled: one of tsv, csv, jsonl, conll, conllu; default: tsv or conll", "")
    max_length: Optional[int] = setting("truncate inputs at this many tokens; default: the model's length", None)
    no_grouping: bool = setting("training batches of examples of any length, as most papers on GLUE have them", False)
    word_dropout: float = setting(
        "share of the tokens of training inputs, in [0, 1), that the mask token replaces, anew in every epoch", 0.0
    )
    seed: int = II("common.seed")


def described_task(cfg: Any, kinds: tuple[str, ...]) -> LabelledTask:
    """Find the task of one of these kinds that the flags name, or make the one that they describe.

    Raises:
        ValueError: an unknown task or one of another kind; flags that contradict each other or say too little.
    """
    given = {name: value for name in _DESCRIBING if (value := getattr(cfg, name, None))}
    if cfg.labelled:
        if given:
            flag = f"--{next(iter(given)).replace('_', '-')}"
            raise ValueError(f"{flag} describes a task that has no name; leave it or --labelled {cfg.labelled} out")
        task = find_task(cfg.labelled)
    else:
        if not given:
            raise ValueError("give --labelled NAME, or describe the files by --text-columns and --label-column")
        kind = REGRESSION if getattr(cfg, "regression", False) else kinds[0]
        task = own_task(kind, **{"file_format": "conll" if kind == TAGGING else "tsv", **given})
    if task.kind not in kinds:
        raise ValueError(
            f"--labelled {task.name} is a task of {task.kind.replace('_', ' ')}; use --task {TASKS_OF_KINDS[task.kind]}"
        )
    return task


class LabelledTextTask(FairseqTask):
    """Labelled text behind fairseq; `AttnRegTask` stands before it.

    Attributes:
        labelled: the task, with its label set.
        tokenizer: the model's.
        longest: tokens an input may have.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    source_dictionary = target_dictionary = None  # the tokenizer has the vocabulary, `labelled` the labels

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        if not 0 <= cfg.word_dropout < 1:
            raise ValueError(f"--word-dropout is {cfg.word_dropout}, but must lie in [0, 1)")
        self.labelled = with_labels(described_task(cfg, self.kinds), cfg.data)
        path = self._encoder_path(cfg)
        config = load_config(path)
        self.tokenizer = load_tokenizer(path, self.labelled)
        if not set(self.tokenizer.get_vocab()) - set(self.tokenizer.all_special_tokens):
            # where there are no files, transformers makes a tokenizer of the model's family that knows no word
            raise ValueError(f"the tokenizer of {path} could not be loaded: there is none with a vocabulary")
        if len(self.tokenizer) > config.vocab_size:
            raise ValueError(
                f"--hf-model {path}: the tokenizer has {len(self.tokenizer)} tokens, but the model's embedding only "
                f"{config.vocab_size}"
            )
        try:
            self.longest = longest_input(self.tokenizer, config, cfg.max_length)
        except ValueError as error:
            raise ValueError(f"--max-length: {error}") from None
        self.examples = TrainingExamples(cfg, self.labelled, self.tokenizer)

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> "LabelledTextTask":
        """The task; of a checkpoint it is made in the same way."""
        return cls(cfg)

    @staticmethod
    def _encoder_path(cfg: Any) -> str:
        """Find the tokenizer: in --hf-model, or beside the checkpoints where that is gone."""
        path, kept = cfg.hf_model, saved_encoder(cfg)
        if Path(path).is_dir() or kept is None or not (kept / "config.json").exists():
            return path
        if path.count("/") <= 1:  # a name on the hub comes first, whatever a training before left here
            try:
                load_config(path)
                return path
            except ValueError:
                pass
        logger.warning(f"--hf-model {path} is not available; the tokenizer is taken from {kept}")
        return str(kept)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """The model; of one that is to be trained, what its checkpoints need is kept."""
        model = super().build_model(cfg, from_checkpoint)
        if not from_checkpoint and hasattr(model, "config_json"):
            keep_setting(cfg, "hf_config", model.config_json())
            folder = saved_encoder(self.cfg)
            if folder is not None:
                done_by_first_rank(partial(self._check_labels, folder))  # which later writes there
            if folder is not None and rank() == 0:
                self.tokenizer.save_pretrained(folder)
                write_text(folder / "config.json", model.model.config.to_json_string())  # whole, whenever it is killed
        return model

    def _check_labels(self, folder: Path) -> None:
        """Refuse to go on with a checkpoint of other labels."""
        if (folder.parent / "checkpoint_last.pt").is_file() and (folder / "config.json").is_file():
            check_labels(load_config(str(folder)), self.labelled)

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> None:
        """Read and encode a split; an error names file and line."""
        training, title = split == "train", f"{self.labelled.name} {split}"
        title += ", held out of train" * (split == "valid" and self.cfg.held_out > 0)
        rows = encode(self.examples.of(split), self.labelled, self.tokenizer, self.longest, title)
        logger.info(f"{title}: {len(rows)} examples")
        grouped = not (training and self.cfg.no_grouping)
        dropped = self.cfg.word_dropout if training else 0.0
        self.datasets[split] = LabelledDataset(
            rows, self.labelled.kind, self.tokenizer, training, self.cfg.seed, grouped, word_dropout=dropped
        )

    def get_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Batches of all examples: by its default, 8, fairseq drops the rest of the last batch, of valid too."""
        return super().get_batch_iterator(*args, **{**kwargs, "required_batch_size_multiple": 1})

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """Forget the predictions of earlier validations, which fairseq would keep in every checkpoint."""
        super().begin_valid_epoch(epoch, model)
        metrics.reset_meters("valid")

    def has_sharded_data(self, split: str) -> bool:
        """No: `hub:PATH` is one source, though fairseq parts paths at colons."""
        return False

    def max_positions(self) -> int:
        """Tokens an input may have."""
        return self.longest


def saved_encoder(cfg: Any) -> Path | None:
    """Name the folder `encoder` beside the checkpoints of a training; None without a place for them."""
    save_dir = fairseq_setting(cfg, "save_dir")
    return Path(save_dir) / ENCODER if save_dir else None


@dataclass
class TextClassificationConfig(LabelledTaskConfig):
    """The flags of classification."""

    regression: bool = setting("without --labelled: the labels are values", False)


AttnRegLabelledConfig = with_attn_reg(LabelledTaskConfig)
AttnRegTextClassificationConfig = with_attn_reg(TextClassificationConfig)


@register_task("attn_reg_text_classification", dataclass=AttnRegTextClassificationConfig)
class AttnRegTextClassificationTask(AttnRegTask, LabelledTextTask):
    """GLUE, IMDB, PAWS-X, or texts of one's own; `--criterion attn_reg_classification`."""

    kinds: ClassVar[tuple[str, ...]] = KINDS_OF_TASKS["attn_reg_text_classification"]


@register_task("attn_reg_token_classification", dataclass=AttnRegLabelledConfig)
class AttnRegTokenClassificationTask(AttnRegTask, LabelledTextTask):
    """Named entities and parts of speech in CoNLL and CoNLL-U files; `--criterion attn_reg_tagging`."""

    kinds: ClassVar[tuple[str, ...]] = KINDS_OF_TASKS["attn_reg_token_classification"]


@register_task("attn_reg_multiple_choice", dataclass=AttnRegLabelledConfig)
class AttnRegMultipleChoiceTask(AttnRegTask, LabelledTextTask):
    """SWAG, or choices of one's own; `--criterion attn_reg_classification`."""

    kinds: ClassVar[tuple[str, ...]] = KINDS_OF_TASKS["attn_reg_multiple_choice"]


print_flags_if_asked("attn_reg_text_classification", AttnRegTextClassificationConfig)
print_flags_if_asked("attn_reg_token_classification", AttnRegLabelledConfig)
print_flags_if_asked("attn_reg_multiple_choice", AttnRegLabelledConfig)
