"""Fixtures of the fairseq face: a corpus, and trainings that several tests look at."""

from pathlib import Path

import pytest

from tests.tasks.fairseq_runs import AD_DROP, UPDATES, Finished, make_corpus, train


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def stock(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Stock fairseq, without the plugin, and with validation."""
    ours = {"task": "translation", "user_dir": None, "without": ["--disable-validation"]}
    return train(corpus, tmp_path_factory.mktemp("stock"), *UPDATES, **ours).check()


@pytest.fixture(scope="session")
def regularized(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """AD-DROP on every attention, every update, with validation."""
    flags = [*AD_DROP, "--attn-sites", "*", *UPDATES]
    return train(corpus, tmp_path_factory.mktemp("regularized"), *flags, without=["--disable-validation"]).check()
