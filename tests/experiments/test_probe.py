"""`attn-reg probe`: what is dropped by attribution, its limits, and the pictures, on every kind of trained model."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import torch
from fairseq.data import Dictionary, indexed_dataset
from fairseq.models.transformer import TransformerModel
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf

from attn_reg_plugin.attention.masks import candidate_region
from attn_reg_plugin.cli import main
from attn_reg_plugin.experiments.probe_lens import Point, Subject, looking, prior_experiment
from attn_reg_plugin.experiments.probe_plots import pictures
from attn_reg_plugin.experiments.probe_subjects import Wanted, checkpoints_of, load_subject
from attn_reg_plugin.experiments.trained import load_trained
from attn_reg_plugin.labelled import find_task
from attn_reg_plugin.models.hf_encoder import HFEncoderConfig, HFEncoderModel
from tests.backends.fairseq_models import arguments
from tests.models.hf_folders import TOYS, make_encoder, make_rte, tokenizer
from tests.opus_mt.folders import TINY, make_folder, train_model

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"train": 8, "dev": 12}
KINDS = ["rte", "stsb", "wnut17", "swag", "translation", "marian"]


def head(row: str, folder: Path) -> HFEncoderModel:
    """An encoder with the head for a row of the table, random."""
    cfg = SimpleNamespace(hf_model=str(make_encoder(folder)))
    torch.manual_seed(3)
    return HFEncoderModel.build_model(HFEncoderConfig(), SimpleNamespace(labelled=find_task(row), cfg=cfg)).eval()


def saved(row: str, root: Path) -> tuple[Path, Path]:
    """A folder as Trainer leaves it, and data for it."""
    folder = root / "trainer" / "checkpoint-7"
    head(row, root / "encoder").model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder.parent, TOYS[row][0](root / "data", SIZES)


def translator(root: Path) -> tuple[Path, Path]:
    """A run of fairseq's translation, and its binarized corpus of made-up words."""
    words, data, generator = Dictionary(), root / "corpus" / "bin", torch.Generator().manual_seed(1)
    for number in range(20):
        words.add_symbol(f"w{number}")
    data.mkdir(parents=True)
    for language in ("en", "ro"):
        words.save(str(data / f"dict.{language}.txt"))
        builder = indexed_dataset.make_builder(str(data / f"valid.en-ro.{language}.bin"), "mmap", len(words))
        for length in (5, 3, 7, 2, 6):
            row = torch.randint(4, len(words), (length,), generator=generator)
            builder.add_item(torch.cat([row, torch.tensor([words.eos()])]).int())
        builder.finalize(str(data / f"valid.en-ro.{language}.idx"))
    options = arguments(arch="transformer", dropout=0.3)
    torch.manual_seed(2)
    model = TransformerModel.build_model(options, SimpleNamespace(source_dictionary=words, target_dictionary=words))
    task = OmegaConf.to_container(
        OmegaConf.structured(TranslationConfig(source_lang="en", target_lang="ro")), resolve=False
    )
    known = {name: value for name, value in task.items() if not str(value).startswith("${")}
    subset = {"_name": "translation", "data": "gone", "train_subset": "train", "dataset_impl": None}
    cfg = {"model": options, "task": {**known, **subset, "required_seq_len_multiple": 1}}
    folder = root / "run" / "checkpoints"
    folder.mkdir(parents=True)
    state = {"args": None, "cfg": cfg, "model": model.state_dict(), "extra_state": {"train_iterator": {"epoch": 1}}}
    torch.save(
        {**state, "optimizer_history": [{"num_updates": 1, "lr_scheduler_state": {}, "optimizer_name": "A"}]},
        folder / "checkpoint_best.pt",
    )
    return folder.parent, data.parent


def marian(root: Path) -> tuple[Path, Path]:
    """A Marian folder and the raw lines of a corpus."""
    model = train_model(["a b c", "hello there", "x y z"] * 9, root / "pieces.model", 20, hard_vocab_limit=False)
    make_folder(root / "marian", [model, model], TINY)
    (root / "raw").mkdir()
    for language in ("en", "ro"):
        (root / "raw" / f"valid.{language}").write_text("a b c\nhello there\nx\n", encoding="utf-8")
    return root / "marian", root


@pytest.fixture
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    """One of `KINDS`, loaded from its folder."""
    row = request.param
    if row == "translation":
        run, data = translator(tmp_path)
    elif row == "marian":
        run, data = marian(tmp_path)
    else:
        run, data = saved(row, tmp_path)
    task = None if row in ("translation", "marian") else row
    return load_subject(run, Wanted(str(data), examples=0, batch_size=5, task=task))


def by(points: list[Point], which: str, p: float) -> Point:
    """The point of these."""
    return next(point for point in points if point.which == which and point.p == p)


@pytest.mark.parametrize("subject", KINDS, indirect=True)
def test_limits_and_direction(subject: Subject) -> None:
    """Nothing dropped is plain evaluation; everything dropped is the same whatever comes first; in between it isn't."""
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    with torch.no_grad():
        measured = [subject.measure(subject.model(**one["net_input"]), one) for one in subject.samples]
    losses = torch.cat([one.losses for one in measured])
    state = torch.get_rng_state()
    points = prior_experiment(subject, [0.0, 0.5, 1.0], sites="*")
    assert torch.get_rng_state().equal(state)
    nothing = by(points, "none", 0.0)
    assert nothing.loss == pytest.approx(losses.double().mean().item(), abs=1e-6) and nothing.dropped == 0
    for which in ("high", "low", "random"):
        assert by(points, which, 0.0).loss == pytest.approx(nothing.loss, abs=1e-5)
        assert by(points, which, 1.0).loss == pytest.approx(by(points, "high", 1.0).loss, abs=1e-6)
        assert by(points, which, 0.5).dropped == by(points, "high", 0.5).dropped > 0.45
        assert by(points, which, 1.0).dropped == 1 and by(points, which, 1.0).attention == pytest.approx(1)
        assert by(points, which, 0.0).attention == 0 < by(points, which, 0.5).attention < 1
    assert len({by(points, which, 0.5).loss for which in ("high", "low", "random")} | {nothing.loss}) >= 3
    after = subject.model.state_dict()
    assert all(value.equal(after[name]) for name, value in before.items()) and before.keys() == after.keys()
    assert not any(module.training for module in subject.model.modules())
    assert all(parameter.requires_grad for name, parameter in subject.model.named_parameters() if "pos" not in name)
    repeated = prior_experiment(subject, [0.0, 0.5, 1.0], sites="*")
    assert repeated == points, "the same seed gives the same figures"


@pytest.mark.parametrize("subject", ["rte"], indirect=True)
def test_maps_are_the_models_own_and_high_hurts_what_low_helps(subject: Subject) -> None:
    sample = subject.sentence(2)
    model = subject.model.model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**sample["net_input"], output_attentions=True)
    model.set_attn_implementation("sdpa")
    chosen = expected.logits.argmax()
    with looking(subject.model) as lens:
        maps = lens.look(subject, sample)
        logits = {}
        for direction in (1.0, -1.0):
            # of each row the position with the highest, or the lowest, attribution
            best = [(direction * one.attribution).argmax(-1, keepdim=True) for one in maps]
            keeps = [torch.ones_like(one.attribution, dtype=torch.bool) for one in maps]
            keeps = [keep.scatter(-1, place, False) for keep, place in zip(keeps, best, strict=True)]
            logits[direction] = lens.drop(subject, sample, maps, keeps)["logits"].flatten()[chosen]
    for one, theirs in zip(maps, expected.attentions, strict=True):
        torch.testing.assert_close(one.attention, theirs, atol=1e-5, rtol=0)
    assert logits[1.0] < logits[-1.0]
    subject.samples = [sample]
    (point,) = prior_experiment(subject, [1 / 50], which=("high",))[1:]
    regions = [candidate_region(one.attribution, one.valid, 1 / 50, "high") for one in maps]
    lost = sum(float(theirs[region].sum()) for theirs, region in zip(expected.attentions, regions, strict=True))
    rows = sum(theirs[..., 0].numel() for theirs in expected.attentions)
    assert point.attention == pytest.approx(lost / rows, abs=1e-5), "the weights of a row add up to 1"
    with looking(subject.model.train()):
        pass
    assert all(module.training for module in subject.model.modules())
    assert 1 / 40 < point.dropped < 1 / 3, "one position of each row, for no row is longer than 50"


@pytest.mark.parametrize("subject", ["translation"], indirect=True)
def test_maps_have_their_tokens(subject: Subject) -> None:
    sample = subject.sentence(3)
    tokens = subject.tokens(sample, 0)
    with looking(subject.model, sites="*") as lens:
        maps = lens.look(subject, sample)
    drawn = {average: pictures(maps, tokens, 0, average, 0.3) for average in ("mean", "layers", "heads")}
    assert [len(drawn[average]) for average in drawn] == [3, 6, 12]
    encoder, cross, *_ = [next(one for one in drawn["mean"] if kind in one.title) for kind in ("encoder", "cross")]
    assert encoder.rows == encoder.columns == cross.columns == tokens["encoder"] and len(encoder.rows) == 8
    assert cross.rows == tokens["decoder"] and cross.rows[0] == "</s>" and len(cross.rows) == 8
    decoder = next(one for one in drawn["heads"] if one.title == "decoder.self[1], head 0")
    assert decoder.valid.equal(torch.ones(8, 8).tril().bool()) and not (decoder.marked & ~decoder.valid).any()
    torch.testing.assert_close(decoder.attention.sum(-1), torch.ones(8))
    mean = torch.stack([one.attention for one in drawn["heads"] if "cross" in one.title]).mean(0)
    torch.testing.assert_close(cross.attention, mean)


def test_padding_is_neither_drawn_nor_counted(tmp_path: Path) -> None:
    run, data = saved("swag", tmp_path)
    subject = load_subject(run, Wanted(str(data), task="swag"))
    sample = next(one for one in map(subject.sentence, range(1, 9)) if not one["net_input"]["attention_mask"].all())
    row = int((sample["net_input"]["attention_mask"][0].sum(-1)).argmin())
    with looking(subject.model) as lens:
        (drawn, _) = pictures(lens.look(subject, sample), subject.tokens(sample, row), row, "layers", 0.0)
    assert len(drawn.rows) == len(drawn.columns) == int(sample["net_input"]["attention_mask"][0, row].sum())
    assert drawn.columns[0] == "[CLS]" and drawn.columns[-1] == "[SEP]" and drawn.valid.all()


def test_a_run_of_finetune_is_read_by_its_checkpoint(tmp_path: Path) -> None:
    model, run = head("rte", tmp_path / "start"), tmp_path / "run" / "checkpoints"
    (run / "encoder").mkdir(parents=True)
    tokenizer().save_pretrained(run / "encoder")
    task = {"_name": "attn_reg_text_classification", "labelled": "rte", "max_length": 30}
    cfg = {"model": {"hf_config": model.config_json()}, "task": task}
    for name in ("checkpoint_best.pt", "checkpoint1.pt", "checkpoint10.pt", "checkpoint2.pt"):
        torch.save({"cfg": cfg, "model": model.state_dict()}, run / name)
    data = str(make_rte(tmp_path / "data", SIZES))
    subject = load_subject(run.parent, Wanted(data, examples=5))
    assert load_trained(run.parent).longest == 30 and sum(len(one["target"]) for one in subject.samples) == 5
    assert [number for number, _ in checkpoints_of(run.parent)] == [1, 2, 10]
    out = tmp_path / "out"
    words = ["probe", str(run.parent), data, "--out", str(out), "--p", "0.5", "--cpu"]
    assert main([*words, "--every-checkpoint", "--text", "w1 w2", "w3", "--maps", "mean"]) == 0
    found = json.loads((out / "probe.json").read_text(encoding="utf-8"))
    assert list(found["checkpoints"]) == ["1", "2", "10"]
    assert found["sentence"]["tokens"]["encoder"] == ["[CLS]", "w1", "w2", "[SEP]", "w3", "[SEP]"]
    for name in ("maps.png", "checkpoints.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    more = ["--q", "0.5", "--examples", "5", "--attribution", "attention", "--labels", "gold", "--sentence", "0"]
    assert main([*words[:-3], "--p", "0.1,0.3", *more]) == 0
    found = json.loads((out / "probe.json").read_text(encoding="utf-8"))
    assert [(point["which"], point["p"]) for point in found["points"][:3]] == [
        ("none", 0),
        ("high", 0.1),
        ("high", 0.3),
    ]
    assert found["attribution"] == "attention" and (out / "dropping.png").is_file() and "sentence" not in found


def test_what_cannot_be_probed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = saved("rte", tmp_path)
    base = {"run": str(run), "data": str(data)}
    given: list[tuple[list[str], dict[str, str], str]] = [
        ([], base, "does not say what its labels mean; name the task of the data by --task"),
        (["--task", "mnli"], base, "has 2 labels, but task mnli has 3"),
        (["--task", "cola"], base, "has the labels entailment, not_entailment, but task cola"),
        (["--task", "swag"], base, "holds BertForSequenceClassification, but multiple choice needs a model"),
        (["--task", "rte", "--sentence", "99"], base, "--sentence is 99, but valid has the examples 1 to 12"),
        (["--task", "rte", "--text", "w1"], base, "--text was given 1 texts, but an input of task rte has 2"),
        (["--task", "rte", "--sites", "decoder.cross"], base, "'decoder.cross'"),
        (["--task", "rte", "--q", "2"], base, "--q is 2.0, but must lie in [0, 1]"),
        (["--every-checkpoint"], base, "--every-checkpoint measures one ratio"),
        (["--every-checkpoint", "--p", "0.3"], base, "has 1 checkpoints by epoch, but a curve needs 2"),
        ([], {**base, "run": str(tmp_path / "gone")}, "there is no run"),
        ([], {**base, "run": str(data)}, "has no checkpoint; looked for checkpoint_best.pt"),
    ]
    out = tmp_path / "out"
    for words, places, said in given:
        assert main(["probe", places["run"], places["data"], "--out", str(out), "--cpu", *words]) == 2, words
        assert said in capsys.readouterr().err, words
    with pytest.raises(SystemExit):
        main(["probe", str(run), str(data), "--out", str(out), "--p", "0.1,2"])
    assert "must be numbers in [0, 1], with commas" in capsys.readouterr().err and not out.exists()


def test_arguments_have_defaults(tmp_path: Path) -> None:
    """The flags' own: the parser converts a default that is a text."""
    from attn_reg_plugin.cli import build_parser

    parsed: Namespace = build_parser("probe").parse_args(["probe", "run", "data", "--out", str(tmp_path)])
    assert parsed.p == [0.1, 0.3, 0.5, 0.7, 0.9] and parsed.sentence == 1 and parsed.maps == "layers"
