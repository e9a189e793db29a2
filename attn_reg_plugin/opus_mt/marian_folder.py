"""An OPUS-MT folder as the Hugging Face hub has it: its parts, and whether they fit together.

No weight is read by unpickling more than tensors: safetensors, or `pytorch_model.bin` with `weights_only`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_reg_plugin.checkpoints import load_weights
from attn_reg_plugin.files import reason_of
from attn_reg_plugin.opus_mt.tokenization import CONFIG, GENERATION, OpusMTTokenizer, read_json

if TYPE_CHECKING:
    from transformers import MarianConfig

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
BIAS = "final_logits_bias"
#: Hugging Face's name of an activation → fairseq's
ACTIVATIONS = {"swish": "swish", "silu": "swish", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate"}
#: names of the embeddings: of both sides and the output, of the source, of the target, of the output
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
    activation = content.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{path}: activation_function {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if content.get("tie_word_embeddings", True) is False:
        raise ValueError(f"{path}: tie_word_embeddings is false, but only models with tied embeddings are converted")
    return MarianConfig.from_dict(content)


def renormalizes(path: Path) -> bool:
    """Tell whether `generate` bans padding and then makes the other pieces' probabilities sum to 1.

    Older folders have no file of generation settings beside `config.json`, but have them in it.
    """
    beside = path.with_name(GENERATION)
    settings, padding = read_json(beside if beside.is_file() else path), read_json(path).get("pad_token_id")
    return bool(settings.get("renormalize_logits")) and [padding] in (settings.get("bad_words_ids") or [])


def embeddings(config: MarianConfig) -> dict[str, tuple[str, ...]]:
    """Map the name under which an embedding is kept → the other names that a file may have for it."""
    if config.share_encoder_decoder_embeddings:
        return {SHARED: (ENCODER, DECODER, OUTPUT)}
    return {ENCODER: (), DECODER: (OUTPUT,)}


def checked(path: Path, found: dict[str, Tensor], config: MarianConfig) -> dict[str, Tensor]:
    """Take the tensors of a model by their one name, without sinusoids; a bias may be missing, and is 0 then.

    Args:
        path: their file, for messages.
        found: Hugging Face's name → tensor, tied ones under any of their names.

    Raises:
        ValueError: one is missing, of no such model or of another shape, or tied ones differ.
    """
    from transformers import MarianMTModel

    ties = embeddings(config)
    ignored = {*(name for names in ties.values() for name in names), *_POSITIONS}
    with torch.device("meta"):
        state = MarianMTModel(config).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in ignored}
    tensors = {name: tensor for name, tensor in found.items() if name not in ignored}
    for kept, others in ties.items():
        for name in (name for name in (kept, *others) if name in found):
            if not torch.equal(found[name], tensors.setdefault(kept, found[name])):
                raise ValueError(f"{path}: {name} differs from {kept}, but the configuration ties them")
    tensors.setdefault(BIAS, torch.zeros(shapes[BIAS]))
    missing, foreign = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or foreign:
        what = f"lacks {missing[0]}" if missing else f"has {foreign[0]}, which no such model has"
        raise ValueError(f"{path} is not of the Marian model that {CONFIG} describes: it {what}")
    for name, size in shapes.items():
        if tuple(tensors[name].shape) != size:
            raise ValueError(f"{path}: {name} has shape {tuple(tensors[name].shape)}, but {CONFIG} asks for {size}")
    return {name: tensors[name].contiguous() for name in shapes}


def download(name: str) -> Path:
    """Download a model of the Hugging Face hub into the local cache; its folder.

    Raises:
        ValueError: it cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    try:
        for weights in WEIGHTS:
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.spm", weights]))
            if (folder / weights).is_file():
                break
    except Exception as error:  # no network, no such model, no disk: the hub has its own error for each
        raise ValueError(f"the model {name} could not be downloaded ({reason_of(error)})") from None
    return folder


@dataclass(frozen=True)
class MarianFolder:
    """A whole OPUS-MT folder, checked; `tensors` are by Hugging Face's names, each once, in the file's precision."""

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
        config, tokenizer = read_config(path / CONFIG), OpusMTTokenizer(path)
        _check_vocabularies(path, config, tokenizer)
        weights = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
        if weights is None:
            raise FileNotFoundError(f"{path} has no weights in one file: neither {' nor '.join(WEIGHTS)}")
        found = load_weights(weights)
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise ValueError(f"{weights} holds no names with tensors")
        return cls(path, config, tokenizer, checked(weights, found, config))


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
