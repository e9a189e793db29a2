"""Tiny models with random weights in folders, their tokenizer, and texts: what the clients are tried on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

WORDS = "the a cat dog bird fish sees likes eats small big red old new good bad and or not it".split()
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
#: of a training that is short and quiet
QUIET: dict[str, Any] = {
    "max_steps": 20,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 3,
}
CHAT = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words separated by spaces, between <s> and </s>."""
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, **names, cls_token="<s>", sep_token="</s>", chat_template=CHAT, model_max_length=40
    )


def sentences(size: int, seed: int = 1, longest: int = 9) -> list[str]:
    """Texts of 3 to `longest` words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest + 1, (size,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator)) for n in lengths]


_SIZES = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def folder_of(path: Path, kind: str, **options: Any) -> str:
    """A folder with a tiny model of a class of transformers, attention sharp, and the tokenizer."""
    torch.manual_seed(1)
    cls = getattr(transformers, kind)
    cls(cls.config_class(**{**_SIZES, **options})).save_pretrained(path)
    model = cls.from_pretrained(path)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def weights(model: nn.Module) -> Tensor:
    """All parameters in one vector, a copy."""
    return torch.cat([parameter.detach().reshape(-1).float().clone() for parameter in model.parameters()])


def dropped(trainer: Any) -> dict[str, float]:
    """The drop rates in the trainer's log, by site."""
    lines = [line for line in trainer.state.log_history if any(key.startswith("drop_") for key in line)]
    assert lines, trainer.state.log_history
    return {key: value for key, value in lines[-1].items() if key.startswith("drop_")}
