"""Fixtures of the torch-only tests: tiny models and a batch. Other tests need nothing from here."""

import gc
from pathlib import Path

import pytest

TINY = {"attention", "backends", "bench", "clients", "huggingface", "lightning", "models", "regularizers"}


def pytest_collection_modifyitems(config, items):
    """Leave out what is marked `oracle` or `papers`, unless it is selected by `-m`; files with whole trainings first.

    At the end of the suite no core waits for another one's long file then.
    """
    for mark in ("oracle", "papers"):
        if mark not in config.option.markexpr:
            left_out = [item for item in items if item.get_closest_marker(mark)]
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
            config.hook.pytest_deselected(items=left_out)
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish():
    """Frameworks are imported once and for all: the garbage collector need not search them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread():
    """Tensors this small are computed fastest, and on a busy machine many times faster, by one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _on_one_thread(request):
    """See `one_thread`, in the folders whose models are tiny."""
    if request.path.relative_to(Path(__file__).parent).parts[0] in TINY:
        request.getfixturevalue("one_thread")


@pytest.fixture
def limited():
    """No file of this process may become longer than so many bytes, as on a full disk; without a number, as before."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size=before[0]: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def translator():
    """A tiny encoder-decoder in training mode, without dropout."""
    return _translator(dropout=0.0)


@pytest.fixture
def dropping_translator():
    """The same with dropout everywhere."""
    return _translator(dropout=0.2)


@pytest.fixture
def classifier():
    """A tiny encoder classifier in training mode, without dropout."""
    import torch

    from tests.attention.tiny_model import TinyClassifier, sharpened

    torch.manual_seed(5)
    return sharpened(TinyClassifier()).train()


@pytest.fixture
def batch():
    """Source (3, 6) and target (3, 5) of unequal lengths."""
    from tests.attention.tiny_model import tokens

    return tokens([6, 4, 2], 6, seed=1), tokens([3, 5, 1], 5, seed=2)


def _translator(dropout: float):
    import torch

    from tests.attention.tiny_model import TinyTranslator, sharpened

    torch.manual_seed(3)
    return sharpened(TinyTranslator(dropout)).train()
