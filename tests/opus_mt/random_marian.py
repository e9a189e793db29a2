"""An OPUS-MT folder with random weights, made on the spot: to try a configuration out without a download."""

from collections.abc import Sequence
from pathlib import Path

from tests.opus_mt.folders import edit, make_folder, train_model

#: six layers, as the published models have; the rest is tiny
_STACK = {"layers": 6, "attention_heads": 2, "ffn_dim": 24}
SHAPE = {"d_model": 16, **{f"{stack}_{name}": _STACK[name] for stack in ("encoder", "decoder") for name in _STACK}}


def make_marian(folder: Path, languages: tuple[str, str], texts: Sequence[Sequence[str]], pieces: int = 120) -> Path:
    """Write a folder as Marian's `save_pretrained` does; `texts` are lines of both languages, for their pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("source.spm", "target.spm")
    models = [train_model(lines, folder / name, pieces) for name, lines in zip(names, texts, strict=True)]
    make_folder(folder, models, SHAPE)
    edit(folder / "tokenizer_config.json", source_lang=languages[0], target_lang=languages[1])
    return folder
