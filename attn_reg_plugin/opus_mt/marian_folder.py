"""An OPUS-MT folder as the Hugging Face hub has it: what is in it, and whether its parts fit together.

No weight is read by unpickling more than tensors: safetensors, or `pytorch_model.bin` with `weights_only`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.checkpoints import load_weights
from attn_reg_plugin.opus_mt.tokenization import CONFIG, GENERATION, OpusMTTokenizer, read_json

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: after such a name: which tensor is in which of several files
INDEX = ".index.json"
BIAS = "final_logits_bias"
#: Hugging Face's name of an activation → fairseq's
ACTIVATIONS = {"swish": "swish", "silu": "swish", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate"}
#: the names under which the embeddings are kept: of the source, of the target, of the output
SHARED = "model.shared.weight"
ENCODER, DECODER, OUTPUT = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"
POSITIONS = tuple(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))


@dataclass(frozen=True)
class MarianShape:
    """What the configuration of a Marian model says, as far as it shapes the model.

    Attributes:
        shared: whether source, target and output have one embedding; else target and output have one.
        start: Marian's number of the piece that decoding starts from.
        renormalizes: whether search bans padding and then makes the other pieces' probabilities sum to 1.
    """

    width: int
    layers: tuple[int, int]
    feed_forward: tuple[int, int]
    heads: tuple[int, int]
    vocabulary: tuple[int, int]
    activation: str
    scaled: bool
    shared: bool
    positions: int
    start: int
    dropout: float
    attention_dropout: float
    activation_dropout: float
    layerdrop: tuple[float, float]
    renormalizes: bool

    @classmethod
    def read(cls, path: Path) -> MarianShape:
        """From a `config.json`, and from the generation settings beside it, if there are any.

        Raises:
            ValueError: it is not a Marian translation model's, lacks a setting, or asks for what is not built here.
            FileNotFoundError: there is no such file.
        """
        config = read_json(path)
        if config.get("model_type") != "marian":
            raise ValueError(f"{path} is of model type {config.get('model_type')!r}, not 'marian'")
        activation = config.get("activation_function", "gelu")
        if activation not in ACTIVATIONS:
            raise ValueError(f"{path}: activation_function {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if config.get("tie_word_embeddings", True) is False:
            raise ValueError(
                f"{path}: tie_word_embeddings is false, but only models with tied embeddings are converted"
            )
        for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
            if config.get(name):
                raise ValueError(f"{path}: {name} is true, which Hugging Face's Marian does not follow either")
        if config.get("decoder_start_token_id") != config.get("pad_token_id"):
            raise ValueError(
                f"{path}: decoder_start_token_id {config.get('decoder_start_token_id')} is not pad_token_id "
                f"{config.get('pad_token_id')}, which Marian starts from"
            )
        try:
            return cls._of(config, ACTIVATIONS[activation], _renormalizes(path, config))
        except KeyError as error:
            raise ValueError(f"{path} lacks {error.args[0]}") from None

    @classmethod
    def _of(cls, config: dict[str, Any], activation: str, renormalizes: bool) -> MarianShape:
        def both(name: str, default: float | None = None) -> tuple[Any, Any]:
            keys = f"encoder_{name}", f"decoder_{name}"
            pair = [config[key] if default is None else config.get(key, default) for key in keys]
            return pair[0], pair[1]

        return cls(
            width=config["d_model"],
            layers=both("layers"),
            feed_forward=both("ffn_dim"),
            heads=both("attention_heads"),
            vocabulary=(config["vocab_size"], config.get("decoder_vocab_size") or config["vocab_size"]),
            activation=activation,
            scaled=bool(config.get("scale_embedding", False)),
            shared=bool(config.get("share_encoder_decoder_embeddings", True)),
            positions=config.get("max_position_embeddings", 1024),
            start=config["decoder_start_token_id"],
            dropout=config.get("dropout", 0.1),
            attention_dropout=config.get("attention_dropout", 0.0),
            activation_dropout=config.get("activation_dropout", 0.0),
            layerdrop=both("layerdrop", 0.0),
            renormalizes=renormalizes,
        )

    def embeddings(self) -> dict[str, tuple[str, ...]]:
        """The name under which an embedding is kept → the other names that a file may have for it."""
        if self.shared:
            return {SHARED: (ENCODER, DECODER, OUTPUT)}
        return {ENCODER: (), DECODER: (OUTPUT,)}

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Hugging Face's name and the shape of every tensor, each once."""
        width = self.width
        rows = dict(zip((ENCODER, DECODER), self.vocabulary, strict=True)) | {SHARED: self.vocabulary[0]}
        yield from ((name, (rows[name], width)) for name in self.embeddings())
        yield BIAS, (1, self.vocabulary[0] if self.shared else self.vocabulary[1])
        for number, stack in enumerate(("encoder", "decoder")):
            attentions = ("self_attn", "encoder_attn")[: number + 1]
            norms = (*(f"{name}_layer_norm" for name in attentions), "final_layer_norm")
            inner = self.feed_forward[number]
            parts: dict[str, tuple[int, ...]] = {}
            for name in attentions:
                parts |= {f"{name}.{letter}_proj": (width, width) for letter in ("k", "v", "q", "out")}
            parts |= {"fc1": (inner, width), "fc2": (width, inner)} | {name: (width,) for name in norms}
            for layer in range(self.layers[number]):
                for name, shape in parts.items():
                    yield f"model.{stack}.layers.{layer}.{name}.weight", shape
                    yield f"model.{stack}.layers.{layer}.{name}.bias", shape[:1]


def _renormalizes(path: Path, config: dict[str, Any]) -> bool:
    """Whether `generate` bans padding and renormalizes: older folders have no file of generation settings for it."""
    settings = read_json(path.with_name(GENERATION)) if path.with_name(GENERATION).is_file() else config
    banned = settings.get("bad_words_ids") or []
    return bool(settings.get("renormalize_logits")) and [config.get("pad_token_id")] in banned


@dataclass(frozen=True)
class MarianFolder:
    """A whole OPUS-MT folder, checked.

    Attributes:
        tensors: Hugging Face's name → tensor, each once, in the file's own precision.
    """

    path: Path
    shape: MarianShape
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
        shape = MarianShape.read(path / CONFIG)
        tokenizer = OpusMTTokenizer(path)
        _check_vocabularies(path, shape, tokenizer)
        names = [name + end for name in WEIGHTS for end in ("", INDEX)]  # a file, or the index of several
        weights = next((path / name for name in names if (path / name).is_file()), None)
        if weights is None:
            raise FileNotFoundError(f"{path} has no weights: neither {' nor '.join(WEIGHTS)}, nor {INDEX} of either")
        tensors = read_shards(weights) if weights.name.endswith(INDEX) else read_tensors(weights)
        return cls(path, shape, tokenizer, _checked(weights, tensors, shape))


def _check_vocabularies(path: Path, shape: MarianShape, tokenizer: OpusMTTokenizer) -> None:
    """Check that every piece has a row of the embedding, and every row a piece."""
    if shape.shared and tokenizer.separate:
        raise ValueError(f"{path}: the tokenizer has separate vocabularies, but the embeddings are shared")
    for side, rows in zip((tokenizer.source, tokenizer.target), shape.vocabulary, strict=True):
        if len(side.vocabulary.ids) != rows:
            raise ValueError(
                f"{side.vocabulary.path} has {len(side.vocabulary.ids)} pieces, but by {path / CONFIG} the embedding "
                f"has {rows} rows; they must be as many"
            )
        if side.vocabulary.order[0] != shape.start:
            raise ValueError(
                f"{side.vocabulary.path} numbers {tokenizer.special['pad_token']!r} {side.vocabulary.order[0]}, but by "
                f"{path / CONFIG} decoding starts from {shape.start}, which must be the same"
            )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a weight file.

    Raises:
        ValueError: it isn't such a file, is damaged, or holds anything but tensors.
    """
    content = load_weights(path)
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} holds no names with tensors")
    return content


def read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of a model in several files.

    Args:
        index: `model.safetensors.index.json` or `pytorch_model.bin.index.json`, whose `weight_map` says which tensor is
            in which file beside it.

    Raises:
        ValueError: it isn't such an index, names a file outside its folder, or does not fit what the files hold.
        FileNotFoundError: one of the files is missing.
    """
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise ValueError(f"{index} holds no 'weight_map' of tensors to files")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(named.values())):
        path = index.parent / name
        if Path(name).name != name or not name.endswith((".safetensors", ".bin")):
            raise ValueError(f"{index} names {name!r}, which isn't a weight file in its own folder")
        if not path.is_file():
            raise FileNotFoundError(f"{index.parent} has no {name}, which {index.name} names")
        there = read_tensors(path)
        wanted = [tensor for tensor, file in named.items() if file == name]
        for tensor in wanted:
            if tensor not in there:
                raise ValueError(f"{path} lacks {tensor}, which {index.name} says is there")
        tensors |= {tensor: there[tensor] for tensor in wanted}
    return tensors


def _checked(path: Path, found: dict[str, Tensor], shape: MarianShape) -> dict[str, Tensor]:
    """The tensors of a file by their one name, every one there and of its shape."""
    expected = dict(shape.expected())
    for kept, others in shape.embeddings().items():
        there = [name for name in (kept, *others) if name in found]
        if not there:
            continue
        found[kept] = found[there[0]]
        for name in there[1:]:
            if not torch.equal(found[name], found[kept]):
                raise ValueError(f"{path}: {name} differs from {there[0]}, but the configuration ties them")
    if BIAS not in found:
        found[BIAS] = torch.zeros(expected[BIAS])
    ignored = {*(name for names in shape.embeddings().values() for name in names), *POSITIONS}
    missing = [name for name in expected if name not in found]
    foreign = [name for name in found if name not in expected and name not in ignored]
    if missing or foreign:
        what = f"lacks {missing[0]}" if missing else f"has {foreign[0]}, which no such model has"
        raise ValueError(f"{path} is not of the Marian model that {CONFIG} describes: it {what}")
    for name, size in expected.items():
        if tuple(found[name].shape) != size:
            raise ValueError(f"{path}: {name} has shape {tuple(found[name].shape)}, but {CONFIG} asks for {size}")
    return {name: found[name] for name in expected}
