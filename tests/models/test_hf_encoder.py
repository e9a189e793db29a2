"""The encoder behind fairseq is transformers' own model with its own head."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from attn_reg_plugin import ADDrop
from attn_reg_plugin.models.hf_encoder import HFEncoderConfig, HFEncoderModel, load_config
from attn_reg_plugin.tasks import labelled_task
from tests.models.hf_folders import build, make_encoder, tokenizer

CLASSES = {
    "mnli": transformers.BertForSequenceClassification,
    "stsb": transformers.BertForSequenceClassification,
    "wnut17": transformers.BertForTokenClassification,
    "swag": transformers.BertForMultipleChoice,
}


#: family -> options that make it small, where they have other names
SMALL = {"DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def batch(row: str = "mnli", padding: int = 0) -> dict[str, Tensor]:
    """Three examples of unequal lengths, with more padding than they need."""
    texts = ["w1 w2x w3 w4 w5", "w6 w7", "w8x"]
    if row == "swag":
        texts = [text for text in texts for _ in range(4)]
    seconds = [f"w{number} w{number + 1}" for number in range(len(texts))]
    inputs = dict(tokenizer()(texts, seconds, padding=True, return_tensors="pt"))
    inputs = {name: torch.nn.functional.pad(ids, (0, padding)) for name, ids in inputs.items()}
    return {name: ids.view(3, 4, -1) for name, ids in inputs.items()} if row == "swag" else inputs


@pytest.mark.parametrize("row", CLASSES)
def test_it_is_the_model_of_transformers(folder: Path, row: str, tmp_path: Path) -> None:
    model = build(folder, row).eval()
    assert type(model.model) is CLASSES[row]
    logits = model(**batch(row))["logits"]
    sizes = {"mnli": (3, 3), "stsb": (3, 1), "swag": (3, 4), "wnut17": (3, batch()["input_ids"].size(1), 13)}
    assert logits.shape == sizes[row] and logits.dtype == torch.float32
    stock = transformers.AutoModel.from_pretrained(folder)
    for name, weight in stock.state_dict().items():
        if not name.startswith("pooler") or row != "wnut17":
            assert torch.equal(model.model.state_dict()[f"bert.{name}"], weight)
    model.model.save_pretrained(tmp_path)
    again = CLASSES[row].from_pretrained(tmp_path).eval()
    assert torch.equal(again(**batch(row)).logits, logits)


@pytest.mark.parametrize("row", CLASSES)
def test_autocast_is_that_of_torch(folder: Path, row: str) -> None:
    """Logits equal transformers' model under `torch.autocast`; weights, logits and gradients stay in fp32."""
    model, inputs = build(folder, row, autocast="bfloat16").eval(), batch(row)
    logits = model(**inputs)["logits"]
    assert build(folder, row, autocast=False).autocast is None, "what YAML makes of a bare `off`"
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model.model(**inputs).logits
    full = model.model(**inputs).logits
    assert logits.dtype == torch.float32 and torch.equal(logits, wanted.float()) and not torch.equal(logits, full)
    torch.testing.assert_close(logits, full, atol=0.1, rtol=0.05)
    logits.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}


def test_autocast_keeps_no_weights_from_one_forward_to_the_next(folder: Path) -> None:
    """fairseq wraps a step in an autocast of its own, which is off and would keep what is cast until it ends."""
    model, inputs = build(folder, autocast="bfloat16").eval(), batch()
    with torch.autocast("cpu", enabled=False):
        model(**inputs)
        with torch.no_grad():
            model.model.classifier.weight.zero_()
            model.model.classifier.bias.zero_()
        assert not model(**inputs)["logits"].any()


def test_a_checkpoint_needs_no_pretrained_model(folder: Path) -> None:
    model = build(folder, "mnli", dropout=0.3).eval()
    again = build("/nowhere", "mnli", hf_config=model.config_json()).eval()
    again.load_state_dict(model.state_dict())
    assert again.model.config.hidden_dropout_prob == 0.3
    assert torch.equal(again(**batch())["logits"], model(**batch())["logits"])


def test_a_checkpoint_of_other_labels_is_refused(folder: Path) -> None:
    """Also where they are as many, as labels of another training file may be."""
    model = build(folder, "mnli")
    model.model.config.id2label = {0: "entailment", 1: "contradiction", 2: "neutral"}
    said = "has the labels entailment, contradiction, neutral, but the data entailment, n"
    with pytest.raises(ValueError, match=said):
        build("/nowhere", "mnli", hf_config=model.config_json())


@pytest.mark.parametrize("family", ["DistilBert", "Roberta", "Electra"])
def test_types_go_where_a_model_takes_them(family: str, tmp_path: Path) -> None:
    """The tokenizer gives token types, which DistilBERT does not take and RoBERTa has one of."""
    options = {**SMALL, "Roberta": {"type_vocab_size": 1}}
    model = build(make_encoder(tmp_path, family, **options.get(family, {}))).eval()
    assert model.takes_types == (family == "Electra")
    inputs = batch()
    other = model(**{**inputs, "token_type_ids": 1 - inputs["token_type_ids"]})["logits"]
    assert torch.equal(model(**inputs)["logits"], other) == (not model.takes_types)


POOLED = ["Bert", "Camembert", "DebertaV2", "DistilBert", "Electra", "MPNet", "Roberta", "XLMRoberta"]


@pytest.mark.parametrize("family", POOLED)
def test_mean_pooling_is_the_mean_of_the_tokens(family: str, tmp_path: Path) -> None:
    """Literally: each example alone, the mean of its last hidden states to the head, in place of the first token."""
    model = build(make_encoder(tmp_path, family, **SMALL.get(family, {})), pooling="mean").eval()
    again = build("/nowhere", hf_config=model.config_json()).eval()
    again.load_state_dict(model.state_dict())
    inputs, head = batch(padding=2), model.model
    found = model(**inputs)["logits"]
    assert torch.equal(again(**inputs)["logits"], found), "a checkpoint pools as its training did"
    model.model.config.save_pretrained(tmp_path)
    assert build(tmp_path, pooling="mean").mean_pooled and not build(tmp_path).mean_pooled
    head.base_model._forward_hooks.clear()
    for number, length in enumerate(inputs["attention_mask"].sum(1)):
        one = {name: ids[number : number + 1, :length] for name, ids in inputs.items() if name != "token_type_ids"}
        if model.takes_types:
            one["token_type_ids"] = inputs["token_type_ids"][number : number + 1, :length]
        mean = head.base_model(**one).last_hidden_state.mean(1)
        if family == "Bert":
            wanted = head.classifier(mean)
        elif family == "DistilBert":
            wanted = head.classifier(torch.relu(head.pre_classifier(mean)))
        else:
            inner = head.pooler(mean[:, None]) if family == "DebertaV2" else mean[:, None]
            wanted = head.classifier(inner)
        torch.testing.assert_close(found[number], wanted[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("row", CLASSES)
@pytest.mark.parametrize("regularized", [False, True])
def test_padding_never_matters(folder: Path, row: str, regularized: bool) -> None:
    """Also of the probe: with q = 1 every candidate is dropped, so nothing is drawn."""
    model = build(folder, row, dropout=0.0, attention_dropout=0.0, classifier_dropout=0.0)
    targets = torch.tensor([1.0, 2.0, 3.0]) if row == "stsb" else None
    regularizer = ADDrop(p=0.3, q=1.0, cross_tuning="off")
    plain = model.train()(**batch(row))["logits"]
    with regularizer.attach(model):
        regularizer.supply(targets=targets)
        model.train(regularized)
        tight, wide = model(**batch(row))["logits"], model(**batch(row, padding=5))["logits"]
    if row == "wnut17":
        real = batch()["attention_mask"].bool()
        tight, wide, plain = tight[real], wide[:, :-5][real], plain[real]
    if row == "swag":  # what is attributed is the score of the choice that wins: the others depend on nothing of theirs
        best = plain.argmax(-1, keepdim=True)
        tight, wide, plain = (logits.gather(1, best) for logits in (tight, wide, plain))
    assert torch.allclose(tight, wide, atol=1e-5)
    assert torch.allclose(tight, plain, atol=1e-6) == (not regularized)


@pytest.mark.parametrize(
    ("path", "on_the_hub", "taken"),
    [
        ("roberta-base", True, "roberta-base"),
        ("some/model", True, "some/model"),
        ("roberta-base", False, "encoder"),
        ("models/gone", False, "encoder"),
        ("/a/folder/gone", True, "encoder"),
        ("HERE", False, "HERE"),
    ],
)
def test_what_an_earlier_training_left_is_taken_only_where_the_model_is_gone(
    path: str, on_the_hub: bool, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        if not on_the_hub:
            raise ValueError(f"no {name}")

    monkeypatch.setattr(labelled_task, "load_config", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "HERE").mkdir()
    kept = tmp_path / "run" / "encoder"
    kept.mkdir(parents=True)
    cfg = SimpleNamespace(hf_model=path, attn_save_dir=str(tmp_path / "run"))
    assert labelled_task.LabelledTextTask._encoder_path(cfg) == path, "nothing was left there"
    (kept / "config.json").touch()
    assert labelled_task.LabelledTextTask._encoder_path(cfg) == (str(kept) if taken == "encoder" else path)


T5 = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "initializer_factor": 1.0}
REFUSED: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "no model": (lambda folder, path: load_config(""), "needs --hf-model"),
    "no folder": (lambda folder, path: load_config("/no/such/folder"), "there is no folder /no/such/folder"),
    "an empty folder": (lambda folder, path: load_config(str(path)), "neither a folder of a model"),
    "a dropout": (lambda folder, path: build(folder, dropout=1.0), r"--dropout is 1.0, but must be in \[0, 1\)"),
    "no such head": (
        lambda folder, path: build(make_encoder(path, "T5", **T5), "swag"),
        "no multiple choice head for t5 models",
    ),
    "no labels": (
        lambda folder, path: HFEncoderModel.build_model(HFEncoderConfig(), SimpleNamespace()),
        "is for tasks such as attn_reg_text_classification",
    ),
    "pooling": (lambda folder, path: build(folder, pooling="max"), "'max', but must be one of first, mean"),
    "the mean of a tagger": (
        lambda folder, path: build(folder, "wnut17", pooling="mean"),
        "--pooling mean is not for tagging with bert models",
    ),
    "autocast": (lambda folder, path: build(folder, autocast="float16"), "'float16', but must be one of off, bfloat16"),
    "autocast and fp16": (
        lambda folder, path: build(folder, autocast="bfloat16").half(),
        "give either --autocast or --fp16",
    ),
    "autocast of deberta": (
        lambda folder, path: build(make_encoder(path, "Deberta"), autocast="bfloat16"),
        "DeBERTa of version 1 does not run in autocast",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_named(case: str, folder: Path, tmp_path: Path) -> None:
    make, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        make(folder, tmp_path)


@pytest.mark.parametrize("size", [None, 0, 3000])
def test_weights_that_are_missing_or_cut_are_named(size: int | None, folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        weights = path.suffix == ".safetensors"
        if not weights or size is not None:
            (tmp_path / path.name).write_bytes(path.read_bytes()[: size if weights else None])
    said = r"\(model\.safetensors\) cannot be read \(SafetensorError"
    said = r"its weights cannot be read .* --hf-from-config" if size is None else said
    with pytest.raises(ValueError, match=said) as e:
        build(tmp_path)
    assert size is None or "\n" not in str(e.value)


def test_other_families_stay_unread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing the configurations that have a head would import that of every family."""
    mapping = type(transformers.AutoModelForSequenceClassification._model_mapping)
    listed: list[object] = []
    monkeypatch.setattr(mapping, "keys", lambda self: listed.append(self) or [transformers.BertConfig])
    build(folder)
    assert not listed
