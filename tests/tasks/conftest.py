"""What the tests of the fairseq face share: a corpus, and trainings that several of them look at."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from tests.tasks.fairseq_runs import AD_DROP, UPDATES, Trained, make_corpus, train


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The binarized corpus."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def stock(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Stock fairseq, without the plugin, and with validation."""
    folder = tmp_path_factory.mktemp("stock")
    ours = {"task": "translation", "user_dir": None, "without": ["--disable-validation"]}
    return Trained(train(corpus, folder, *UPDATES, **ours), folder)


@pytest.fixture(scope="session")
def regularized(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """AD-DROP on every attention, every update, with validation."""
    folder = tmp_path_factory.mktemp("regularized")
    flags = [*AD_DROP, "--attn-sites", "*", *UPDATES]
    return Trained(train(corpus, folder, *flags, without=["--disable-validation"]), folder)
