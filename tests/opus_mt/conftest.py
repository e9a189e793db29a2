"""Fixtures of the tests of OPUS-MT: sentencepiece models, and a tiny Marian beside its conversion."""

from pathlib import Path

import pytest

from attn_reg_plugin.corpora.phrasebook import splits
from attn_reg_plugin.opus_mt.conversion import to_fairseq
from attn_reg_plugin.opus_mt.marian_folder import MarianFolder
from tests.opus_mt.folders import TINY, load_tokenizer, make_folder, train_model


@pytest.fixture(scope="session")
def phrases() -> dict[str, list]:
    """Sentences of the phrasebook."""
    return splits(1500, 60, 100)


@pytest.fixture(scope="session")
def models(phrases: dict[str, list], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A sentencepiece model of English and one of Romanian."""
    folder = tmp_path_factory.mktemp("spm")
    return [
        train_model((getattr(triple, name) for triple in phrases["train"]), folder / f"{name}.spm", 300)
        for name in ("en", "ro")
    ]


@pytest.fixture(scope="session")
def marian(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A tiny Marian with random weights and a shared vocabulary: its model, folder and tokenizer."""
    folder = tmp_path_factory.mktemp("marian") / "hf"
    return make_folder(folder, models, TINY, codes=[">>ron<<", ">>tur<<"]), folder, load_tokenizer(folder)


@pytest.fixture(scope="session")
def separate(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """The same with a vocabulary for each language."""
    folder = tmp_path_factory.mktemp("separate") / "hf"
    model = make_folder(folder, models, TINY, share_encoder_decoder_embeddings=False)
    return model, folder, load_tokenizer(folder)


@pytest.fixture(scope="session")
def converted(marian: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Marian for fairseq."""
    out = tmp_path_factory.mktemp("fairseq") / "converted"
    to_fairseq(MarianFolder.open(marian[1]), out)
    return out
