"""Tiny models with random weights in folders, their tokenizer, and texts: what the clients are tried on."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from attn_reg_plugin.huggingface import AttnRegCallback
from attn_reg_plugin.regularizers import ADDrop, Regularizer
from tests.huggingface.trainers import weights

_TEXT = "the a cat dog bird fish sees likes eats small big red old new good bad and or not it"
WORDS = _TEXT.split()
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


#: makes a trainer of a client, which has not trained: (callbacks, options of its arguments) -> trainer
Make = Callable[[list[Any], dict[str, Any]], Any]


def trained(make: Make, regularizer: Regularizer | None, **options: Any) -> Any:
    """A client's trainer after 20 updates, with the callback as the one line that is added."""
    transformers.set_seed(3)
    trainer = make([] if regularizer is None else [AttnRegCallback(regularizer)], options)
    trainer.train()
    return trainer


def check_client(make: Make, sites: str, says: str, caplog: Any) -> Any:
    """Check a client: with p = 0 it trains as without the callback, else AD-DROP acts and the log says of what F."""
    stock = trained(make, None)
    idle = trained(make, ADDrop(p=0.0, sites=sites, cross_tuning="off"))
    assert torch.equal(weights(idle.model), weights(stock.model))
    with caplog.at_level(logging.INFO):
        ours = trained(make, ADDrop(p=0.5, q=0.5, sites=sites, cross_tuning="off"))
    assert [says in record.message for record in caplog.records if "attributes" in record.message] == [True]
    logged = [line for line in ours.state.log_history if "attn_reg/regularized" in line][-1]
    assert logged["attn_reg/regularized"] == 1 and logged["attn_reg/probe_fallbacks"] == 0 and logged["step"] == 20
    assert 0.1 < logged["attn_reg/drop_rate"] < 0.4, logged
    assert weights(ours.model).isfinite().all() and not torch.equal(weights(ours.model), weights(stock.model))
    return ours


def check_saved(folder: Path, saved: nn.Module, loaded: nn.Module) -> None:
    """A folder, loaded by the client's own code, has the weights and nothing of ours but the method's own state."""
    assert torch.equal(weights(saved), weights(loaded))
    texts = [path for path in folder.rglob("*.json") if "attn_reg" in path.read_text(encoding="utf-8")]
    assert not texts
