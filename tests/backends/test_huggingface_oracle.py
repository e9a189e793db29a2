"""Every model of transformers' auto-mappings, made tiny: attached and dropping nothing, it trains as the stock one.

With right and left padding and in bfloat16, the loss and all gradients are those of a copy that nothing is attached
to. A sample runs every day; all of them by `pytest -m oracle tests/backends/test_huggingface_oracle.py` (minutes).
What is not so today is in `oracle_exceptions.txt`, with the reason: models that cannot be made tiny by these rules or
that lack a package, and models that are refused with a sentence.
"""

from __future__ import annotations

import random

import pytest

pytest.importorskip("transformers")

from tests.backends.oracle_models import exceptions, outcome, pairs

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = ["/".join(pair) for pair in pairs()]
EXCEPTIONS = exceptions()
GOOD = [pair for pair in PAIRS if pair not in EXCEPTIONS]
REFUSED = [pair for pair in PAIRS if EXCEPTIONS.get(pair, "").startswith("refused")]
SAMPLE = sorted(random.Random(7).sample(GOOD, 12))


@pytest.mark.parametrize("pair", SAMPLE)
def test_a_sample_trains_as_the_stock_model(pair: str) -> None:
    assert outcome(*pair.split("/")) == "same"


@pytest.mark.parametrize("pair", sorted(random.Random(7).sample(REFUSED, 2)))
def test_a_sample_is_refused(pair: str) -> None:
    assert outcome(*pair.split("/")).startswith("refused: ")


@pytest.mark.oracle
@pytest.mark.parametrize("pair", PAIRS)
def test_every_model_trains_as_the_stock_model(pair: str) -> None:
    """Or is the exception that the file says it is."""
    found, expected = outcome(*pair.split("/")), EXCEPTIONS.get(pair, "same")
    assert found.split(":")[0] == expected.split(":")[0], found


def test_exceptions_are_of_models_that_exist() -> None:
    assert set(EXCEPTIONS) <= set(PAIRS)
    assert {reason.split(":")[0] for reason in EXCEPTIONS.values()} <= {"unbuilt", "refused", "raised"}
