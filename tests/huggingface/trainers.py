"""Trainers of tiny models on tiny data, for the tests of the callback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments

from attn_reg_plugin.huggingface import AttnRegCallback
from attn_reg_plugin.regularizers import ADDrop, AttendOut, Regularizer
from tests.backends.huggingface_models import CLASSES, PAD, WORDS, build, fingerprint


def examples(name: str, size: int = 24, seed: int = 4) -> list[dict[str, list[int] | int]]:
    """Examples of unequal lengths, with a class, the tokens themselves, or a translation as labels."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(size):
        lengths = torch.randint(3, 8, (2,), generator=generator).tolist()
        source, target = (torch.randint(4, WORDS, (n,), generator=generator).tolist() for n in lengths)
        classified = dict.fromkeys(("bert", "deberta_v3"), source[0] % CLASSES)
        labels = {**classified, "llama": source}.get(name, target)
        made.append({"input_ids": source, "labels": labels})
    return made


def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest."""
    ids = [torch.tensor(example["input_ids"]) for example in batch]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
    if isinstance(batch[0]["labels"], int):
        labels = torch.tensor([example["labels"] for example in batch])
    else:
        targets = [torch.tensor(example["labels"]) for example in batch]
        labels = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
    return {"input_ids": padded, "attention_mask": mask, "labels": labels}


def translating(model: nn.Module) -> Any:
    """A collator that also makes the decoder's input, as label smoothing needs it."""

    def collated(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = collate(batch)
        return {**made, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=made["labels"])}

    return collated


class On(TrainerCallback):
    """Calls a function at an event."""

    def __init__(self, event: str, function: Callable[..., Any]) -> None:
        setattr(self, event, lambda *args, **kwargs: function(*args, **kwargs) and None)


def trainer_of(
    folder: Path,
    name: str = "bert",
    regularizer: Regularizer | None = None,
    model: nn.Module | None = None,
    dropout: float = 0.1,
    callbacks: tuple[TrainerCallback, ...] = (),
    rates_by_site: bool = False,
    own: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """A trainer of a tiny model of the family `name`: 4 examples a batch, 20 updates, quiet.

    Args:
        own: of the trainer itself, such as `compute_metrics`.
        options: of the training arguments.
    """
    model = build(name, dropout) if model is None else model
    translates = name == "marian"
    base = {"max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 4, "seed": 3}
    base |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = Seq2SeqTrainingArguments if translates else TrainingArguments
    kept = [] if regularizer is None else [AttnRegCallback(regularizer, rates_by_site=rates_by_site)]
    data: dict[str, Any] = {"train_dataset": examples(name), "eval_dataset": examples(name, 8, seed=5)}
    data["data_collator"] = translating(model) if translates else collate
    return (Seq2SeqTrainer if translates else Trainer)(
        model=model,
        args=arguments(output_dir=str(folder), **{**base, **options}),
        callbacks=[*kept, *callbacks],
        **{**data, **(own or {})},
    )


def ad_drop(**options: Any) -> ADDrop:
    """AD-DROP on every site and in every update."""
    return ADDrop(**{"p": 0.5, "q": 0.5, "sites": "*", "cross_tuning": "off", **options})


def weights(model: nn.Module) -> Tensor:
    """All parameters in one vector of fp32, a copy; each whole, of which processes have parts."""
    parameters = (getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters())
    return torch.cat([one.detach().reshape(-1).float().clone() for one in parameters])


def lone_and_game(folder: Path, name: str, **options: Any) -> tuple[Trainer, Trainer, dict[str, Any]]:
    """After equal trainings without dropout: a lone trainer, one inside AttendOut's first round, and its defender."""
    game, trained = AttendOut(steps=8, sites="*"), []
    for method in (None, game):
        trained.append(trainer_of(folder, name, method, dropout=0.0, **options))
        trained[-1].train()
    return *trained, game.state_dict()["defender"]


def print_of(model: nn.Module) -> dict[str, Any]:
    """Everything that attaching changes in a model, without what any training by a stock Trainer changes."""
    found = {}
    for path, (kind, names, hooks, _, config) in fingerprint(model).items():
        config = config and {key: value for key, value in config.items() if key != "problem_type"}
        found[path] = kind, [name for name in names if name != "_is_accelerate_prepared"], hooks, config
    return found
