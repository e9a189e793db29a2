"""`--arch opus_mt` computes what Hugging Face's Marian computes: states, logits, translations."""

import copy
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from attn_reg_plugin.models.opus_mt import NEVER, MarianPositions, OpusMTModel
from attn_reg_plugin.opus_mt.tokenization import OpusMTTokenizer
from tests.opus_mt.folders import TINY, load_tokenizer, make_folder
from tests.opus_mt.sides import Sides

#: as the issue of the conversion asks; what is measured is about 2e-6
CLOSE = 1e-4
#: length penalties, with how many pieces a translation has at least: with the lower one the empty one often wins
PENALTIES = [(1.0, 0), (0.6, 5)]


@pytest.fixture(scope="module", params=["shared", "separate"])
def sides(request: pytest.FixtureRequest, marian: tuple, separate: tuple, tmp_path_factory) -> Sides:
    model, folder, tokenizer = marian if request.param == "shared" else separate
    made = Sides(model, folder, tmp_path_factory.mktemp("converted") / "out")
    made.tokenizer = tokenizer
    return made


@pytest.fixture(scope="module")
def texts(phrases: dict) -> list[str]:
    return [triple.en for triple in phrases["train"]]


@pytest.fixture(scope="module")
def targets(phrases: dict, sides: Sides) -> list[torch.Tensor]:
    encode = sides.task.target_dictionary.encode_line
    lines = (" ".join(sides.text.target.encode(triple.ro)) for triple in phrases["train"][:7])
    return [encode(line, add_if_not_exist=False).long() for line in lines]


def unequal(sides: Sides, texts: list[str]) -> list[torch.Tensor]:
    """Source sentences of very unequal lengths, one of them empty."""
    return sides.sources([texts[0], "", texts[1] + " " + texts[2], "a", " ".join(texts[:9]), texts[3], texts[4]])


@pytest.mark.parametrize("left", [False, True])
def test_teacher_forced_logits(sides: Sides, texts: list[str], targets: list[torch.Tensor], left: bool) -> None:
    rows = unequal(sides, texts)
    goal = sides.batch(targets, left=False)
    expected = sides.logits(sides.batch(rows, left=False), goal)[1]
    ours = sides.logits(sides.batch(rows, left), goal)[0]
    real = goal.ne(1)
    assert ours.shape == expected.shape and len(ours.flatten()) > 10_000
    torch.testing.assert_close(ours[real], expected[real], atol=CLOSE, rtol=0)


def test_a_batch_of_one_and_a_sentence_of_512_pieces(sides: Sides, texts: list[str]) -> None:
    for row in (sides.sources(texts[:1])[0], sides.sources([" ".join(texts[:200])])[0][-512:]):
        tokens = row[None]
        for ours, theirs in (sides.encoded(tokens), sides.logits(tokens, tokens.clamp(max=len(sides.orders[1])))):
            torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=0)
    assert len(row) == 512


def compare_translations(
    sides: Sides, texts: list[str], penalty: float, shortest: int, batch: int, lengths: int = 4, distinct: int = 20
) -> int:
    """Check that every translation is the same; how many ended before the longest length.

    Of those there must be so many lengths and so many distinct ones.

    At that length Hugging Face counts the forced `</s>` as certain and fairseq at its probability, so sentences that
    Hugging Face ends there are left out. fairseq stops at `beam` finished translations, which Hugging Face calls early
    stopping.
    """
    options = {"beam_size": 4, "len_penalty": penalty, "min_len": shortest}
    sides.balance(texts[:24], 24, **options)
    like = {"num_beams": 4, "length_penalty": penalty, "min_new_tokens": shortest or None, "early_stopping": True}
    theirs = sides.generated(sides.tokenizer, texts, batch, **like)
    ours = sides.translations(texts, batch, left=True, **options)
    ended = [number for number, row in enumerate(theirs) if len(row) < sides.length - 1]
    assert [ours[number] for number in ended] == [theirs[number] for number in ended]
    assert {row[-1] for row in ours} == {0}
    assert len({len(ours[number]) for number in ended}) >= lengths
    assert len({tuple(ours[number]) for number in ended}) >= distinct
    return len(ended)


@pytest.mark.parametrize(("penalty", "shortest"), PENALTIES)
def test_100_translations(sides: Sides, texts: list[str], penalty: float, shortest: int) -> None:
    few = {"batch": 83, "lengths": 3, "distinct": 10}
    assert compare_translations(sides, texts[:165], penalty, shortest, **few) >= 100


def test_padding_above_every_piece_as_in_published_models(models: list[Path], texts: list[str], tmp_path: Path) -> None:
    """Padding has a logit of 0, the other pieces less; the folder bans it before the softmax, and so does search."""
    made = make_folder(tmp_path / "hf", models, TINY)
    with torch.no_grad():
        made.final_logits_bias -= 6.0
        made.model.shared.weight[-1] = 0.0
        made.final_logits_bias[0, -1] = 0.0
    made.generation_config.renormalize_logits = True
    made.save_pretrained(tmp_path / "hf")
    ours, other = Sides(made, tmp_path / "hf", tmp_path / "out"), Sides(made, tmp_path / "hf", tmp_path / "out")
    other.model.decoder.renormalizes = False
    assert ours.model.decoder.renormalizes
    tokens = ours.batch(ours.sources(texts[:8]), left=False)
    logits = ours.logits(tokens, tokens)[0]
    assert logits.softmax(-1)[..., -1].mean() > 0.2, "teacher-forced logits are left as they are"
    ours.tokenizer = load_tokenizer(tmp_path / "hf")
    compare_translations(ours, texts[:99], 1.0, 0, batch=50)
    options = {"left": True, "beam_size": 4}
    assert ours.translations(texts[:99], 50, **options) != other.translations(texts[:99], 50, **options)


def test_incremental_decoding_is_decoding_at_once(sides: Sides, texts: list[str], targets: list) -> None:
    tokens = sides.batch(unequal(sides, texts), left=True)
    width = min(map(len, targets))
    previous = torch.stack([torch.cat([row.new_tensor([2]), row[: width - 1]]) for row in targets])
    model = copy.deepcopy(sides.model).double()  # in fp32 some processors differ by more than CLOSE
    with torch.no_grad():
        encoded = model.encoder(tokens)
        whole = model.decoder(previous, encoder_out=encoded)[0]
        state: dict = {}
        steps = [
            model.decoder(previous[:, : step + 1], encoder_out=encoded, incremental_state=state)[0]
            for step in range(width)
        ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=CLOSE, rtol=0)


def test_the_start_symbol_gets_no_probability_and_no_gradient(sides: Sides, texts: list[str], targets: list) -> None:
    tokens, goal = sides.batch(sides.sources(texts[:7]), left=True), sides.batch(targets, left=False)
    sides.model.zero_grad()
    output = sides.model(tokens, None, goal)
    assert (output[0][..., 0] == NEVER).all()
    scores = sides.model.get_normalized_probs(output, log_probs=True)
    scores.sum().backward()
    assert scores.isfinite().all() and scores[..., 0].exp().max() == 0
    assert sides.model.decoder.embed_tokens.weight.grad[0].abs().max() == 0
    sides.model.zero_grad()


def test_sinusoids_are_their_formula() -> None:
    table = MarianPositions.table(700, 6)
    for position in (0, 1, 511, 699):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert table[position, i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 3 + i].item() == pytest.approx(math.cos(angle), abs=1e-6)
    positions = MarianPositions(6, padding_idx=1, init_size=2)
    padded = positions(torch.tensor([[1, 1, 5, 6], [7, 8, 9, 1]]))
    assert torch.equal(padded[0, 2:], table[:2]) and torch.equal(padded[1, :3], table[:3])
    with pytest.raises(ValueError, match="is 7, but must be even"):
        MarianPositions(7, padding_idx=1, init_size=2)


def test_a_notebook_translates_text(converted: Path, marian: tuple, texts: list[str]) -> None:
    """As the example's README has it: text in, text out, in the tokenizer's numbers."""
    folder = str(converted)
    model = OpusMTModel.from_pretrained(
        folder, data_name_or_path=".", checkpoint_file="checkpoint.pt", bpe="opus_mt", opus_mt_folder=folder
    )
    order = OpusMTTokenizer(converted).source.vocabulary.order
    for text in texts[:5]:
        assert [order[number - 1] for number in model.encode(text).tolist()] == marian[2](text)["input_ids"]
    assert isinstance(model.translate(texts[0], beam=2, max_len_b=10), str)


@pytest.mark.parametrize(
    ("bpe", "warned"), [(None, True), ("gpt2", True), ("opus_mt", False), ("sentencepiece", False)]
)
def test_text_that_nothing_parts_into_pieces(
    bpe: str | None, warned: bool, sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(sides.model)
    model.prepare_for_inference_(Namespace(generation=Namespace(), bpe=bpe and Namespace(_name=bpe)))
    assert ("give --bpe opus_mt --opus-mt-folder DIR" in caplog.text) == warned
