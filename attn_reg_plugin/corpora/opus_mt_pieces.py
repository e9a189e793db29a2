"""`attn-reg prepare ... --opus-mt`: a corpus in the pieces and with the dictionaries of a converted OPUS-MT model.

The prepared folder gets a copy of the tokenizer in `opus_mt/`, so that it is complete: `fairseq-generate --bpe
opus_mt --opus-mt-folder DIR/opus_mt` writes text, and `attn-reg convert opus-mt --to-hf` finds what it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_reg_plugin.corpora.manifest import sha256
from attn_reg_plugin.corpora.preparation_options import PrepareOptions
from attn_reg_plugin.dictionaries import SPECIAL
from attn_reg_plugin.opus_mt.tokenization import (
    SOURCE_MODEL,
    TARGET_MODEL,
    TOKENIZER_FILES,
    OpusMTTokenizer,
    Side,
    copy_files,
    write_dictionaries,
)

FOLDER = "opus_mt"


def describe(options: PrepareOptions) -> dict[str, Any]:
    """What decides the pieces, for the manifest: hashes, no path; empty without `--opus-mt`.

    Raises:
        FileNotFoundError: a file of the tokenizer is missing.
        ValueError: one cannot be used, or the prefix isn't a piece.
    """
    if options.opus_mt is None:
        return {}
    OpusMTTokenizer(options.opus_mt, options.source_prefix)
    files = [options.opus_mt / name for name in TOKENIZER_FILES]
    hashes = {path.name: sha256(path) for path in files if path.is_file()}
    return {"opus_mt": hashes, "source_prefix": options.source_prefix}


def write(options: PrepareOptions, folder: Path) -> dict[str, Any]:
    """Write the dictionaries and `opus_mt/` into a folder; facts for the manifest."""
    assert options.opus_mt is not None
    tokenizer = OpusMTTokenizer(options.opus_mt, options.source_prefix)
    (folder / FOLDER).mkdir()
    copy_files(options.opus_mt, folder / FOLDER)
    write_dictionaries(tokenizer, [folder / name for name in options.dictionaries])
    models = {}
    for name, dictionary, side in zip(
        (SOURCE_MODEL, TARGET_MODEL), options.dictionaries, (tokenizer.source, tokenizer.target), strict=True
    ):
        models[f"{FOLDER}/{name}"] = {
            "dictionary": dictionary,
            "dictionary_size": len(side.vocabulary.symbols) + len(SPECIAL),
            "pieces": len(side.vocabulary.ids),
            "reused": True,
        }
    return {"kind": "opus-mt", "models": models}


def sides(options: PrepareOptions, out: Path) -> tuple[Side, Side]:
    """What encodes the source and the target, from the copy that `write` made."""
    tokenizer = OpusMTTokenizer(out / FOLDER, options.source_prefix)
    return tokenizer.source, tokenizer.target
