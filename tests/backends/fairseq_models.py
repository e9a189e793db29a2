"""Tiny fairseq Transformers and batches for them, without data, tasks or trainers."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer.transformer_legacy import base_architecture
from torch import Tensor

WORDS, HEADS, LAYERS = 30, 2, 2


SIZES = {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("layers", LAYERS), ("embed_dim", 16), ("ffn_embed_dim", 32), ("attention_heads", HEADS))
}


def words() -> Dictionary:
    """A vocabulary of WORDS words."""
    dictionary = Dictionary()
    for word in range(WORDS):
        dictionary.add_symbol(f"w{word}")
    return dictionary


def arguments(**options: Any) -> Namespace:
    """The configuration of a small Transformer; options are named as its flags, such as `attention_dropout=0.1`."""
    args = Namespace(**{**SIZES, "dropout": 0.0, "share_all_embeddings": True, **options})
    base_architecture(args)
    return args


def transformer(seed: int = 1, **options: Any) -> TransformerModel:
    """A Transformer in training mode; options as in `arguments`."""
    shared, args = words(), arguments(**options)
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=shared, target_dictionary=shared)
    return TransformerModel.build_model(args, task).train()


def batch(seed: int = 2) -> dict[str, Tensor]:
    """Four sentence pairs of unequal lengths: sources are padded on the left as fairseq does, targets on the right."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(4, WORDS, (4, 7), generator=generator)
    target = torch.randint(4, WORDS, (4, 6), generator=generator)
    lengths = torch.tensor([7, 6, 4, 3])
    source.masked_fill_(torch.arange(7) < 7 - lengths[:, None], 1)
    target.masked_fill_(torch.arange(6) >= torch.tensor([6, 3, 5, 2])[:, None], 1)
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}
