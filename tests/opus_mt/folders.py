"""OPUS-MT folders made on the spot: sentencepiece models of real or made-up text, and a Marian of any size."""

import json
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

try:
    import torchaudio  # noqa: F401  transformers imports it wherever it is installed
except (ImportError, OSError):  # none, or a build for another torch, which transformers would fail on
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from transformers import MarianConfig, MarianMTModel, MarianTokenizer

TINY = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
}
#: six layers, as the published models have; the rest is tiny
_STACK = {"layers": 6, "attention_heads": 2, "ffn_dim": 24}
SIX = {"d_model": 16, **{f"{stack}_{name}": _STACK[name] for stack in ("encoder", "decoder") for name in _STACK}}


def train_model(lines: Iterable[str], path: Path, size: int, **options: Any) -> Path:
    """A sentencepiece model with sentencepiece's own numbering, as OPUS-MT's are."""
    with path.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, vocab_size=size, minloglevel=2, num_threads=2, **options
        )
    return path


def pieces_of(path: Path) -> list[str]:
    """The ordinary pieces of a model."""
    model = SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(i) for i in range(model.get_piece_size()) if not (model.is_control(i) or i == 0)]


def write_tokenizer(
    folder: Path, source: Path, target: Path, codes: Sequence[str] = (), separate: bool = False, **config: Any
) -> tuple[int, int]:
    """The tokenizer's files of a folder; the sizes of the vocabularies, padding last as Marian's converter puts it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.spm").write_bytes(source.read_bytes())
    (folder / "target.spm").write_bytes(target.read_bytes())
    sides = [pieces_of(source), pieces_of(target)]
    # every other joint piece in front of the rest, so that no order of sentencepiece's is Marian's by chance
    lists = sides if separate else [sides[1][::2] + sides[0]]
    if not separate:
        lists[0] += sides[1][1::2]
    sizes = []
    most = max(len(set(pieces)) for pieces in lists)
    for name, pieces in zip(("vocab.json", "target_vocab.json"), lists, strict=False):
        unique = list(dict.fromkeys(pieces))
        unique += [f"unused{number}" for number in range(most - len(unique))]  # padding has one number in both
        vocabulary = ["</s>", "<unk>", *codes, *unique, "<pad>"]
        numbered = {piece: number for number, piece in enumerate(vocabulary)}
        (folder / name).write_text(json.dumps(numbered), encoding="utf-8")
        sizes.append(len(vocabulary))
    settings = {"source_lang": "en", "target_lang": "ro", "separate_vocabs": separate, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return sizes[0], sizes[-1]


def make_model(
    sizes: tuple[int, int], shape: dict[str, int], seed: int = 1, scale: float = 4.0, **config: Any
) -> MarianMTModel:
    """A Marian with random weights, none of them where a mistake would not show: biases, norms, padding's row."""
    shared = config.setdefault("share_encoder_decoder_embeddings", True)
    settings = MarianConfig(
        vocab_size=sizes[0],
        decoder_vocab_size=sizes[0] if shared else sizes[1],
        pad_token_id=sizes[0] - 1,
        decoder_start_token_id=sizes[0] - 1,
        eos_token_id=0,
        forced_eos_token_id=0,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        **shape,
        **config,
    )
    torch.manual_seed(seed)
    model = MarianMTModel(settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name:
                continue
            if "layer_norm" in name:
                parameter.normal_(std=1.0 if name.endswith("weight") else 0.2)  # signs: else outputs repeat inputs
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif "embed_tokens" in name or "shared" in name:
                parameter.normal_(std=settings.d_model**-0.5)
            else:
                parameter.normal_(std=scale * parameter.shape[1] ** -0.5)
        model.final_logits_bias.normal_(std=0.3)
    return model


def make_folder(
    folder: Path, models: Sequence[Path], shape: dict[str, int], codes: Sequence[str] = (), **config: Any
) -> MarianMTModel:
    """A whole OPUS-MT folder, as `save_pretrained` writes it, and its model."""
    separate = not config.get("share_encoder_decoder_embeddings", True)
    sizes = write_tokenizer(folder, models[0], models[1], codes, separate)
    model = make_model(sizes, shape, **config)
    model.generation_config.bad_words_ids = [[model.config.pad_token_id]]
    model.generation_config.num_beams = 4
    model.save_pretrained(folder)
    return model


def load_tokenizer(folder: Path) -> MarianTokenizer:
    """Hugging Face's tokenizer of a folder."""
    return MarianTokenizer.from_pretrained(folder)


def copy(source: Path, destination: Path) -> Path:
    """A copy of a flat folder."""
    destination.mkdir(parents=True)
    for path in source.iterdir():
        (destination / path.name).write_bytes(path.read_bytes())
    return destination


def edit(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None takes one out."""
    content = json.loads(path.read_text(encoding="utf-8")) | values
    content = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(content), encoding="utf-8")


def make_marian(folder: Path, languages: tuple[str, str], texts: Sequence[Sequence[str]]) -> Path:
    """Write a folder with random weights, to try a configuration out; `texts` are lines of both languages."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("source.spm", "target.spm")
    models = [train_model(lines, folder / name, 120) for name, lines in zip(names, texts, strict=True)]
    make_folder(folder, models, SIX)
    edit(folder / "tokenizer_config.json", source_lang=languages[0], target_lang=languages[1])
    return folder
