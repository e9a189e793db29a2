"""An OPUS-MT folder with random weights, made on the spot: to try a configuration out without a download."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

#: six layers, as the published models have; the rest is tiny
SHAPE = {
    "d_model": 16,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}


def make_marian(folder: Path, languages: tuple[str, str], texts: Sequence[Sequence[str]], pieces: int = 120) -> Path:
    """A folder as Marian's `save_pretrained` writes it.

    Args:
        folder: to write; made if it is missing.
        languages: source and target.
        texts: lines of both, for the sentencepiece models.
        pieces: of each of these.

    Returns:
        the folder.
    """
    from transformers import MarianConfig, MarianMTModel

    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, None] = {}
    for name, lines in zip(("source.spm", "target.spm"), texts, strict=True):
        path = folder / name
        with path.open("wb") as file:
            SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_writer=file, vocab_size=pieces, minloglevel=2, num_threads=1
            )
        model = SentencePieceProcessor(model_file=str(path))
        ordinary = (i for i in range(1, model.get_piece_size()) if not model.is_control(i))
        found |= dict.fromkeys(model.id_to_piece(i) for i in ordinary)
    vocabulary = {piece: number for number, piece in enumerate(["</s>", "<unk>", *found, "<pad>"])}
    _write(folder / "vocab.json", vocabulary)
    settings = {"source_lang": languages[0], "target_lang": languages[1], "separate_vocabs": False}
    _write(folder / "tokenizer_config.json", settings)
    padding = len(vocabulary) - 1
    config = MarianConfig(
        vocab_size=len(vocabulary),
        decoder_vocab_size=len(vocabulary),
        pad_token_id=padding,
        decoder_start_token_id=padding,
        eos_token_id=0,
        forced_eos_token_id=0,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        **SHAPE,
    )
    torch.manual_seed(1)
    model = MarianMTModel(config)
    model.generation_config.bad_words_ids = [[padding]]
    model.save_pretrained(folder)
    return folder


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
