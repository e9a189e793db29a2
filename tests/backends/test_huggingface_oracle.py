"""Every model of transformers' auto-mappings, made tiny: attached and dropping nothing, it trains as the stock one.

With right and left padding and in bfloat16, the loss and all gradients are those of a copy that nothing is attached
to. A sample runs every day; all of them by `pytest -m oracle tests/backends/test_huggingface_oracle.py` (minutes).
What is known is in docs/models.json, which `scripts/models.py` writes, and with it the page of the documentation.
"""

import random

import pytest

from tests.backends.oracle_models import outcome, pairs, records
from tests.backends.oracle_records import record

PAIRS = ["/".join(pair) for pair in pairs()]
RECORDS = records()
GOOD = [pair for pair, made in RECORDS.items() if made["outcome"] == "same"]
REFUSED = [pair for pair, made in RECORDS.items() if made["outcome"] == "refused"]
#: those that are reached in a way of their own
ORDINARY = [
    f"sequence/{kind}" for kind in ("deberta-v2/DebertaV2", "mpnet/MPNet", "xlnet/XLNet", "longformer/Longformer")
]
#: sinks for a head, sinks for a query, soft-capping, and masks that are passed by keyword
KEYWORDS = ["gpt_oss/GptOss", "inkling2_text/Inkling2", "gemma2/Gemma2", "afmoe/Afmoe", "doge/Doge"]
SAMPLE = {*random.Random(7).sample(GOOD, 12), *(f"causal/{kind}ForCausalLM" for kind in KEYWORDS)}


@pytest.mark.parametrize("pair", sorted(SAMPLE))
def test_a_sample_trains_as_the_stock_model(pair: str) -> None:
    assert outcome(*pair.split("/")) == "same"


@pytest.mark.parametrize("pair", sorted(random.Random(7).sample(REFUSED, 2)))
def test_a_sample_is_refused(pair: str) -> None:
    assert outcome(*pair.split("/")).startswith("refused: ")


@pytest.mark.parametrize(
    "pair", ["causal/llama/LlamaForCausalLM", *(f"{pair}ForSequenceClassification" for pair in ORDINARY)]
)
def test_what_is_recorded_is_what_is_found(pair: str) -> None:
    assert record(*pair.split("/")) == RECORDS[pair]


@pytest.mark.oracle
@pytest.mark.parametrize("pair", PAIRS)
def test_every_model_is_as_recorded(pair: str) -> None:
    """A reason may have another wording."""
    found, expected = record(*pair.split("/")), dict(RECORDS[pair])
    assert {**found, "reason": None} == {**expected, "reason": None}, found


def test_every_model_has_a_record() -> None:
    assert set(RECORDS) == set(PAIRS)
    assert {made["outcome"] for made in RECORDS.values()} <= {"same", "unbuilt", "refused", "raised"}
