"""An OPUS-MT folder as the Hugging Face hub has it: its parts, and whether they fit together.

No weight is read by unpickling more than tensors: safetensors, or `pytorch_model.bin` with `weights_only`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_reg_plugin.checkpoints import load_weights
from attn_reg_plugin.opus_mt.tokenization import CONFIG, GENERATION, OpusMTTokenizer, read_json

if TYPE_CHECKING:
    from transformers import MarianConfig

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
BIAS = "final_logits_bias"
#: Hugging Face's name of an activation → fairseq's
ACTIVATIONS = {"swish": "swish", "silu": "swish", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate"}
#: the names under which the embeddings are kept: of both sides and the output, of the source, of the target
SHARED = "model.shared.weight"
ENCODER, DECODER, OUTPUT = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"
_POSITIONS = tuple(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))


def read_config(path: Path) -> MarianConfig:
    """Read a `config.json`.

    Raises:
        ValueError: it is not a Marian translation model's, or asks for what is not built here.
        FileNotFoundError: there is no such file.
    """
    from transformers import MarianConfig

    content = read_json(path)
    if content.get("model_type") != "marian":
        raise ValueError(f"{path} is of model type {content.get('model_type')!r}, not 'marian'")
    for name in ("d_model", "vocab_size", "encoder_layers", "decoder_layers"):
        if not isinstance(content.get(name), int):
            raise ValueError(f"{path} lacks {name}")
    activation = content.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{path}: activation_function {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if content.get("tie_word_embeddings", True) is False:
        raise ValueError(f"{path}: tie_word_embeddings is false, but only models with tied embeddings are converted")
    for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
        if content.get(name):
            raise ValueError(f"{path}: {name} is true, which Hugging Face's Marian does not follow either")
    start, padding = content.get("decoder_start_token_id"), content.get("pad_token_id")
    if start != padding:
        raise ValueError(f"{path}: decoder_start_token_id {start} is not pad_token_id {padding}, where Marian starts")
    return MarianConfig.from_dict(content)


def renormalizes(path: Path) -> bool:
    """Tell whether `generate` bans padding and then makes the other pieces' probabilities sum to 1.

    Args:
        path: of `config.json`; older folders have no file of generation settings beside it, but have them in it.
    """
    beside = path.with_name(GENERATION)
    settings, padding = read_json(beside if beside.is_file() else path), read_json(path).get("pad_token_id")
    return bool(settings.get("renormalize_logits")) and [padding] in (settings.get("bad_words_ids") or [])


def embeddings(config: MarianConfig) -> dict[str, tuple[str, ...]]:
    """Map the name under which an embedding is kept → the other names that a file may have for it."""
    if config.share_encoder_decoder_embeddings:
        return {SHARED: (ENCODER, DECODER, OUTPUT)}
    return {ENCODER: (), DECODER: (OUTPUT,)}


def expected(config: MarianConfig) -> dict[str, tuple[int, ...]]:
    """Map Hugging Face's name → the shape of every tensor that its model has, each once and no sinusoids."""
    from transformers import MarianMTModel

    with torch.device("meta"):
        state = MarianMTModel(config).state_dict()
    aliases = {*(name for names in embeddings(config).values() for name in names), *_POSITIONS}
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in aliases}


@dataclass(frozen=True)
class MarianFolder:
    """A whole OPUS-MT folder, checked.

    Attributes:
        tensors: Hugging Face's name → tensor, each once, in the file's own precision.
    """

    path: Path
    config: MarianConfig
    tokenizer: OpusMTTokenizer
    tensors: dict[str, Tensor]

    @classmethod
    def open(cls, path: Path) -> MarianFolder:
        """Read a folder.

        Raises:
            FileNotFoundError: the folder or one of its files is missing.
            ValueError: a file cannot be read, or does not fit the others.
        """
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: no such folder; give an OPUS-MT model as the Hugging Face hub has it")
        config = read_config(path / CONFIG)
        tokenizer = OpusMTTokenizer(path)
        _check_vocabularies(path, config, tokenizer)
        weights = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
        if weights is None:
            raise FileNotFoundError(f"{path} has no weights in one file: neither {' nor '.join(WEIGHTS)}")
        return cls(path, config, tokenizer, _checked(weights, load_weights(weights), config))


def _check_vocabularies(path: Path, config: MarianConfig, tokenizer: OpusMTTokenizer) -> None:
    """Check that every piece has a row of the embedding, and every row a piece."""
    if config.share_encoder_decoder_embeddings and tokenizer.separate:
        raise ValueError(f"{path}: the tokenizer has separate vocabularies, but the embeddings are shared")
    sizes = (config.vocab_size, config.decoder_vocab_size or config.vocab_size)
    for side, rows in zip((tokenizer.source, tokenizer.target), sizes, strict=True):
        if len(side.vocabulary.ids) != rows:
            raise ValueError(
                f"{side.vocabulary.path} has {len(side.vocabulary.ids)} pieces, but by {path / CONFIG} the embedding "
                f"has {rows} rows; they must be as many"
            )
        if side.vocabulary.order[0] != config.decoder_start_token_id:
            raise ValueError(
                f"{side.vocabulary.path} numbers {tokenizer.special['pad_token']!r} {side.vocabulary.order[0]}, but by "
                f"{path / CONFIG} decoding starts from {config.decoder_start_token_id}, which must be the same"
            )


def _checked(path: Path, found: Any, config: MarianConfig) -> dict[str, Tensor]:
    """Take the tensors of a file by their one name, every one there and of its shape."""
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} holds no names with tensors")
    shapes = expected(config)
    for kept, others in embeddings(config).items():
        there = [name for name in (kept, *others) if name in found]
        for name in there:
            if not torch.equal(found[name], found[there[0]]):
                raise ValueError(f"{path}: {name} differs from {there[0]}, but the configuration ties them")
        found |= {kept: found[there[0]]} if there else {}
    found.setdefault(BIAS, torch.zeros(shapes[BIAS]))
    ignored = {*(name for names in embeddings(config).values() for name in names), *_POSITIONS}
    missing = [name for name in shapes if name not in found]
    foreign = [name for name in found if name not in shapes and name not in ignored]
    if missing or foreign:
        what = f"lacks {missing[0]}" if missing else f"has {foreign[0]}, which no such model has"
        raise ValueError(f"{path} is not of the Marian model that {CONFIG} describes: it {what}")
    for name, size in shapes.items():
        if tuple(found[name].shape) != size:
            raise ValueError(f"{path}: {name} has shape {tuple(found[name].shape)}, but {CONFIG} asks for {size}")
    return {name: found[name] for name in shapes}
