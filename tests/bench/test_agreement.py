"""`attn-reg bench agreement`: the share of candidates in common, what it is measured of, and the command."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from attn_reg_plugin import ADDrop
from attn_reg_plugin.bench.agreement import MEASURES, Agreement, Overlap, Probed, forward_of, mean_share
from attn_reg_plugin.cli import main
from attn_reg_plugin.regularizers import Tokens
from attn_reg_plugin.regularizers.ad_drop.objectives import OfOutputs, negative_loss
from attn_reg_plugin.regularizers.base.context import Supplied
from tests.attention.tiny_model import HEADS, PAD, loss_of

pytestmark = pytest.mark.usefixtures("one_thread")
OBJECTIVES = {"loss": negative_loss, "prediction": OfOutputs()}
LENGTHS = {"encoder": [6, 4, 2], "decoder": [3, 5, 1]}


def agreement_of(model, loss, inputs, targets, **options):
    """An agreement of a batch that an attached model was trained on, at the weights it had then."""
    regularizer = ADDrop(p=0.4, sites="*", probe="kept", on_miss="plain", **options)
    regularizer.attach(model)
    regularizer.begin_epoch(1)
    stacks = dict(zip(("encoder", "decoder"), inputs.values(), strict=False))
    real = {stack: Tokens(ids, ids.ne(PAD)) for stack, ids in stacks.items()}
    mask = stacks.get("decoder", next(iter(stacks.values()))).ne(PAD)
    supplied = Supplied(targets=targets, token_mask=mask, example_tokens=real)

    def train(seed):
        regularizer.supply(supplied)
        torch.manual_seed(seed)
        loss(model(**inputs)).backward()
        regularizer.end_update()

    train(1)
    forwards = [forward_of(model, regularizer.attached_sites, inputs, supplied)]
    return Agreement(regularizer, OBJECTIVES, forwards), train


def translation(model, batch):
    source, target = batch
    targets = target.masked_fill(target.eq(PAD), -100)
    return agreement_of(model, lambda outputs: loss_of(outputs, target), {"source": source, "target": target}, targets)


# -- the share --------------------------------------------------------------------------------------------------------


def test_the_share_of_hand_made_regions():
    first = torch.tensor([[[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]]]).bool()
    second = torch.tensor([[[[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]]]).bool()
    overlap = Overlap()
    overlap.add("encoder.self[0]", first, second, torch.tensor([[[True, True, True]]]))
    assert overlap.shares() == {"encoder.self[0]": 3 / 6}
    overlap.add("encoder.self[1]", first, second, torch.tensor([[[True, True, False]]]))
    overlap.add("encoder.self[2]", first, second, torch.zeros(1, 1, 3, dtype=torch.bool))
    assert overlap.shares() == {"encoder.self[0]": 3 / 6, "encoder.self[1]": 3 / 4}


def test_chance_is_what_regions_drawn_at_random_share():
    keys, count = torch.tensor([[[4, 10]]]), torch.tensor([[[2, 3]]])
    one = Probed(torch.empty(1, 1, 2, 10).bool(), count, keys, torch.ones(1, 1, 2).bool())
    overlap = Overlap()
    overlap.add_chance("encoder.self[0]", one, torch.ones(1, 1, 2).bool())
    generator, common = random.Random(1), 0
    for _ in range(4000):
        for n, k in ((4, 2), (10, 3)):
            common += len(set(generator.sample(range(n), k)) & set(generator.sample(range(n), k)))
    assert overlap.shares()["encoder.self[0]"] == (4 / 4 + 9 / 10) / 5 == pytest.approx(common / 20000, abs=0.01)


def test_all_sites_together_are_weighted_by_their_rows():
    measured = {"rows": {"a": 30, "b": 10, "c": 5}, "kept_loss": {"a": 0.5, "b": 0.7}}
    assert mean_share(measured, "kept_loss") == pytest.approx(0.55)
    assert mean_share(measured, "older_loss") is None


# -- what is compared -------------------------------------------------------------------------------------------------


def test_without_dropout_the_ceiling_is_one_and_what_is_kept_reaches_it(translator, batch):
    agreement, _ = translation(translator, batch)
    measured = agreement.measure()
    assert len(measured["rows"]) == 6 and measured["examples"] == measured["kept"] == 3
    for name in ("noise_loss", "noise_prediction", "kept_loss"):
        assert set(measured[name].values()) == {1.0}
    assert 0 < min(measured["chance"].values()) <= max(measured["chance"].values()) < 1
    assert min(measured["objectives"].values()) < 1 and measured["kept_prediction"] == measured["objectives"]
    assert all(0.8 < share <= 1 for share in measured["precision"].values())


def test_dropout_lowers_the_ceiling_and_the_same_dropout_reaches_one(dropping_translator, batch):
    agreement, train = translation(dropping_translator, batch)
    before = torch.get_rng_state()
    measured = agreement.measure()
    assert before.equal(torch.get_rng_state())
    for name in ("noise_loss", "noise_prediction", "kept_loss"):
        assert mean_share(measured, name) < 1
    train(10_000_000)  # the seed of the first probe
    assert set(agreement.measure()["kept_loss"].values()) == {1.0}


def test_what_is_older_is_of_the_measurement_before(translator, batch):
    agreement, train = translation(translator, batch)
    assert not any(name.startswith("older") for name in agreement.measure())
    kept = agreement.measure()
    assert kept["older_loss"] == kept["kept_loss"]
    with torch.no_grad():
        for parameter in translator.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    train(1)
    measured = agreement.measure()
    assert set(measured["kept_loss"].values()) == {1.0} and mean_share(measured, "older_loss") < 1


def test_only_rows_count_in_which_there_is_something_to_choose(classifier, translator, batch):
    def loss(logits):
        return torch.nn.functional.cross_entropy(logits, torch.tensor([0, 2, 1]))

    source, _ = batch
    agreement, _ = agreement_of(classifier, loss, {"tokens": source}, torch.tensor([0, 2, 1]))
    # of the last layer only the first state is classified, of the layer before it every real one matters
    assert agreement.measure()["rows"] == {"encoder.self[0]": HEADS * (6 + 4 + 2), "encoder.self[1]": HEADS * 3}
    rows = translation(translator, batch)[0].measure()["rows"]
    # the first row of each causal map has one key only
    assert rows["decoder.self[0]"] == HEADS * (2 + 4 + 0) and rows["decoder.cross[0]"] == HEADS * (3 + 5 + 1)


def test_examples_that_nothing_is_kept_of_are_left_out_of_kept(translator, batch):
    agreement, _ = translation(translator, batch)
    store = agreement.regularizer.kept.store
    agreement.measure()
    store._forget(next(iter(store._kept)))
    measured = agreement.measure()
    assert measured["examples"] == 3 and measured["kept"] == 2
    assert set(measured["kept_loss"].values()) == {1.0}


def test_a_site_that_the_training_left_out_has_nothing_kept(translator, batch):
    agreement, train = translation(translator, batch)
    translator.encoder.skip = {1}
    train(1)
    translator.encoder.skip = set()
    measured = agreement.measure()
    assert set(measured["noise_loss"]) - set(measured["kept_loss"]) == {"encoder.self[1]"}


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def encoder_data(tmp_path):
    pytest.importorskip("fairseq")
    pytest.importorskip("transformers")
    from tests.models.hf_folders import make_encoder, make_rte

    return make_encoder(tmp_path / "encoder"), make_rte(tmp_path / "rte")


@pytest.fixture
def translation_data(tmp_path):
    """What `attn-reg prepare` would make of sentences of numbers, as far as a training reads it."""
    fairseq = pytest.importorskip("fairseq.data")
    from fairseq.data.indexed_dataset import make_builder

    generator, words = torch.Generator().manual_seed(1), fairseq.Dictionary()
    for word in range(12):
        words.add_symbol(f"w{word}")
    for folder in ("bin", "raw"):
        (tmp_path / "mt" / folder).mkdir(parents=True)
    for language in ("en", "ro"):
        words.save(str(tmp_path / "mt" / "bin" / f"dict.{language}.txt"))
        (tmp_path / "mt" / "raw" / f"test.{language}").touch()
        for split, size in (("train", 20), ("test", 1)):
            prefix = str(tmp_path / "mt" / "bin" / f"{split}.en-ro.{language}")
            builder = make_builder(f"{prefix}.bin", "mmap", len(words))
            for length in torch.randint(3, 7, (size,), generator=generator).tolist():
                ids = torch.randint(4, len(words), (length,), generator=generator)
                builder.add_item(torch.cat([ids, torch.tensor([words.eos()])]).int())
            builder.finalize(f"{prefix}.idx")
    return tmp_path / "mt"


def check_report(out: Path, printed: str, sites: set[str]) -> None:
    """Two epochs of all sites and measures, in every form."""
    report = json.loads((out / "agreement.json").read_text(encoding="utf-8"))
    first, second = report["epochs"]
    assert [first["epoch"], second["epoch"]] == [1, 2] and second["updates"] == 2 * first["updates"]
    assert first["lr"] > 0 and 0 < first["loss"] < 10 and first["loss"] != second["loss"]
    assert first["kept"] == first["examples"] == 10 and set(first["rows"]) == sites
    for name in MEASURES:
        assert (name in first) != name.startswith("older") and set(second[name]) == sites
        assert all(0 <= share <= 1 for share in second[name].values())
    table = (out / "agreement.md").read_text(encoding="utf-8")
    assert table.count("| all |") == 2 and (out / "agreement.png").stat().st_size < 100_000
    for text in (*sites, "loss: noise", f"{second['loss']:.3f}", f"{100 * second['kept_loss'][min(sites)]:.1f}"):
        assert text in table and text in printed


def test_an_encoder(encoder_data, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder, data = encoder_data
    sizes = ["--epochs", "2", "--examples", "20", "--probed", "10", "--batch-size", "5", "--max-length", "20"]
    own = ["--model", str(encoder), "--lr", "1e-3", "--out", str(tmp_path / "out")]
    assert main(["bench", "agreement", "rte", str(data), *sizes, *own]) == 0
    check_report(tmp_path / "out", capsys.readouterr().out, {"encoder.self[0]", "encoder.self[1]"})


def test_a_translation(translation_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--epochs", "2", "--probed", "10", "--batch-size", "5", "--lr", "0.01", "--out", str(tmp_path / "out")]
    flags = ["--encoder-layers", "1", "--decoder-layers", "1", "--warmup-updates", "1"]
    assert main(["bench", "agreement", "translation", str(translation_data), *sizes, "--", *flags]) == 0
    sites = {"encoder.self[0]", "decoder.self[0]", "decoder.cross[0]"}
    check_report(tmp_path / "out", capsys.readouterr().out, sites)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["translation", "DATA", "--examples", "5"], ["--examples is 5", "labelled tasks only"]),
        (["translation", "DATA"], ["DATA has no folder bin/"]),
        (["nonsense", "DATA"], ["unknown labelled task 'nonsense'", "rte"]),
        (["rte", "DATA", "--p", "1.5"], ["--p is 1.5", "(0, 1)"]),
        (["rte", "DATA", "--probed", "0"], ["--probed is 0", "at least 1"]),
        (["rte"], ["DATA is missing"]),
    ],
)
def test_what_is_refused(arguments, words, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "agreement", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for word in words:
        assert word in error
