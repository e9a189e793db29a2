"""A trained encoder, from a run's checkpoint and the folder `encoder` beside it, which has the tokenizer."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_reg_plugin.checkpoints import find_checkpoint, load_checkpoint, settings_in
from attn_reg_plugin.labelled import Corruption, Encoded, Example, LabelledTask, encode, load_tokenizer, longest_input
from attn_reg_plugin.labelled.dataset import LabelledDataset
from attn_reg_plugin.labelled.task_table import TAGGING
from attn_reg_plugin.models.hf_encoder import HFEncoderModel, autocast_dtype, build_head, config_from_json, labels_of
from attn_reg_plugin.tasks.example_flags import corruption_of
from attn_reg_plugin.tasks.labelled_task import ENCODER, KINDS_OF_TASKS, described_task


@dataclass
class Trained:
    """A trained encoder, with its task and label set.

    Attributes:
        model: transformers' model with its head inside the fairseq one, in evaluation mode.
        longest: tokens an input may have.
        checkpoint: the file it comes from.
        corruption: of its training examples, and of those that its training evaluated on.
    """

    model: HFEncoderModel
    tokenizer: Any
    labelled: LabelledTask
    longest: int
    checkpoint: Path
    corruption: Corruption = field(default_factory=Corruption)

    def encode(self, examples: Sequence[Example], title: str = "") -> list[Encoded]:
        """Examples of the task's kind as the model takes them."""
        return encode(examples, self.labelled, self.tokenizer, self.longest, title)

    @torch.no_grad()
    def logits(self, rows: Sequence[Encoded], batch_size: int = 32) -> list[Tensor]:
        """The logits of every row, fp32 on the CPU, in the order of the rows.

        Each is (number of labels), (1) of a regression, (choices), or (T, number of labels) with T the row's length.
        """
        dataset = LabelledDataset(rows, self.labelled.kind, self.tokenizer)
        order, found = dataset.ordered_indices(), [torch.empty(0)] * len(rows)
        device = next(self.model.parameters()).device
        for chosen in np.array_split(order, range(batch_size, len(order), batch_size)):
            inputs = dataset.collater([dataset[index] for index in chosen])["net_input"]
            logits = self.model(**{name: ids.to(device) for name, ids in inputs.items()})["logits"].float().cpu()
            for index, mask, row in zip(chosen, inputs["attention_mask"], logits, strict=True):
                found[index] = row[mask.bool()] if self.labelled.kind == TAGGING else row
        return found


def load_trained(run: Path, cpu: bool = True) -> Trained:
    """The trained encoder of a run: a folder or a checkpoint, refused where it is damaged or of something else.

    Args:
        cpu: stay on the CPU; else the model goes to the GPU if there is one.
    """
    path = find_checkpoint(run)
    state = load_checkpoint(path)
    settings = settings_in(state, "model")
    if not getattr(settings, "hf_config", None):
        raise ValueError(f"{path} isn't a checkpoint of --arch hf_encoder")
    folder = path.parent / ENCODER
    if not folder.is_dir():
        raise FileNotFoundError(f"{path.parent} has no folder {ENCODER}, in which the training left the tokenizer")
    config, task = config_from_json(settings.hf_config), settings_in(state, "task")
    labelled = described_task(task, KINDS_OF_TASKS[task._name])
    if labelled.labels is None:  # they came from the training file
        labelled = dataclasses.replace(labelled, labels=labels_of(config))
    model = HFEncoderModel(build_head(config, labelled.kind), autocast_dtype(settings))
    model.load_state_dict(state["model"])
    tokenizer = load_tokenizer(str(folder), labelled)
    longest = longest_input(tokenizer, config, task.max_length)
    device = "cpu" if cpu or not torch.cuda.is_available() else "cuda"
    return Trained(model.to(device).eval(), tokenizer, labelled, longest, path, corruption_of(task))
