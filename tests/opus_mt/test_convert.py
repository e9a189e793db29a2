"""From Hugging Face to fairseq and back: nothing is lost, and what does not fit is refused in one sentence."""

from __future__ import annotations

import json
import pickle
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MarianMTModel

from attn_reg_plugin.cli import main
from attn_reg_plugin.opus_mt import conversion as opus_mt_convert
from attn_reg_plugin.opus_mt.conversion import CHECKPOINT, FLAGS, to_fairseq, to_huggingface
from attn_reg_plugin.opus_mt.marian_folder import MarianFolder
from tests.opus_mt.folders import TINY, load_tokenizer, make_folder


def copy(source: Path, destination: Path) -> Path:
    """A copy of a flat folder."""
    destination.mkdir(parents=True)
    for path in source.iterdir():
        (destination / path.name).write_bytes(path.read_bytes())
    return destination


def edit(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None takes one out."""
    content = json.loads(path.read_text(encoding="utf-8")) | values
    content = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(content), encoding="utf-8")


def assert_same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Same names, precisions and bits."""
    assert first.keys() == second.keys() and first
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("kind", ["shared", "separate"])
@pytest.mark.parametrize("precision", [torch.float32, torch.float16, torch.bfloat16])
def test_there_and_back(kind: str, precision: torch.dtype, marian: tuple, separate: tuple, tmp_path: Path) -> None:
    _, original, tokenizer = marian if kind == "shared" else separate
    folder = tmp_path / "hf"
    MarianMTModel.from_pretrained(original).to(precision).save_pretrained(folder)
    for name in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json", "target_vocab.json"):
        if (original / name).is_file():
            (folder / name).write_bytes((original / name).read_bytes())
    assert main(["convert", "opus-mt", str(folder), str(tmp_path / "fairseq")]) == 0
    assert main(["convert", "opus-mt", "--to-hf", str(tmp_path / "fairseq"), str(tmp_path / "back")]) == 0
    assert_same_tensors(load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors"))
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "back").iterdir()}
    first, second = (MarianMTModel.from_pretrained(path).eval() for path in (folder, tmp_path / "back"))
    assert_same_tensors(first.state_dict(), second.state_dict())
    assert first.config.to_dict() == second.config.to_dict() | {"_name_or_path": first.config._name_or_path}
    second.save_pretrained(tmp_path / "again")
    assert_same_tensors(first.state_dict(), MarianMTModel.from_pretrained(tmp_path / "again").state_dict())
    inputs = tokenizer(["the house is old.", "a nurse"], return_tensors="pt", padding=True)
    outputs = [model.float().generate(**inputs, max_length=12) for model in (first, second)]
    theirs, ours = tokenizer, load_tokenizer(tmp_path / "back")
    assert theirs.batch_decode(outputs[0]) == ours.batch_decode(outputs[1])


def test_an_old_folder_with_every_name_a_tensor_ever_had(marian: tuple, tmp_path: Path) -> None:
    """`pytorch_model.bin` with the tied copies and the sinusoids; read without unpickling anything but tensors."""
    model, original, _ = marian
    folder = copy(original, tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    state = model.state_dict()
    assert {"lm_head.weight", "model.encoder.embed_positions.weight"} <= state.keys()
    torch.save(state, folder / "pytorch_model.bin")
    to_fairseq(MarianFolder.open(folder), tmp_path / "out", ("en", "ro"))
    to_fairseq(MarianFolder.open(original), tmp_path / "same", ("en", "ro"))
    states = [torch.load(tmp_path / name / CHECKPOINT, weights_only=True)["model"] for name in ("out", "same")]
    assert_same_tensors(*states)


def test_a_missing_bias_is_zero_as_for_hugging_face(marian: tuple, tmp_path: Path) -> None:
    folder = copy(marian[1], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("final_logits_bias")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert not MarianFolder.open(folder).tensors["final_logits_bias"].any()


def test_the_flags_build_other_shapes_too(models: list[Path], tmp_path: Path) -> None:
    shape = TINY | {"encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 2}
    make_folder(tmp_path / "hf", models, shape, decoder_layerdrop=0.1)
    edit(tmp_path / "hf" / "config.json", activation_function="relu", scale_embedding=False)
    to_fairseq(MarianFolder.open(tmp_path / "hf"), tmp_path / "out")
    flags = (tmp_path / "out" / FLAGS).read_text(encoding="utf-8")
    for part in ("--arch opus_mt --encoder-layers 3", "--decoder-layers 1", "--encoder-attention-heads 2"):
        assert part in flags
    for part in ("--no-scale-embedding", "--activation-fn relu", "--decoder-layerdrop 0.1", "--share-all-embeddings"):
        assert part in flags


def _unlink(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _weights(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit_weights(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit_weights


class Foreign:
    """What no weight file needs."""


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.shared.weight": Foreign()}, folder / "pytorch_model.bin")


def _not_torch(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps([1, 2]))


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def _config(**values: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **values)


def _larger(folder: Path) -> None:
    content = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    edit(folder / "vocab.json", another=len(content))


def _other_padding(folder: Path) -> None:
    content = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    content["<pad>"], content["</s>"] = content["</s>"], content["<pad>"]
    edit(folder / "vocab.json", **content)


BROKEN = {
    "no config": (_unlink("config.json"), r"has no config\.json"),
    "no source model": (_unlink("source.spm"), r"has no source\.spm"),
    "no target model": (_unlink("target.spm"), r"has no target\.spm"),
    "no vocabulary": (_unlink("vocab.json"), r"has no vocab\.json"),
    "no tokenizer": (_unlink("tokenizer_config.json"), r"has no tokenizer_config\.json"),
    "no weights": (_unlink("model.safetensors"), r"neither model\.safetensors nor pytorch_model\.bin"),
    "vocabulary too large": (_larger, r"vocab\.json has 549 pieces, but by .*config\.json the embedding has 548 rows"),
    "another padding": (_other_padding, r"numbers '<pad>' 0, but by .* decoding starts from 547"),
    "config of another size": (_config(vocab_size=549), r"has 548 pieces, but by .* has 549 rows"),
    "not marian": (_config(model_type="bart"), r"config\.json is of model type 'bart', not 'marian'"),
    "no width": (_config(d_model=None), r"config\.json lacks d_model"),
    "another activation": (_config(activation_function="mish"), r"activation_function 'mish' is not one of swish"),
    "another start": (_config(decoder_start_token_id=0), r"decoder_start_token_id 0 is not pad_token_id 547"),
    "untied": (_config(tie_word_embeddings=False), "tie_word_embeddings is false"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
    "vocabulary no JSON": (lambda f: (f / "vocab.json").write_bytes(b"\xff"), r"vocab\.json is not JSON in UTF-8"),
    "model no model": (lambda f: (f / "source.spm").write_bytes(b"x"), r"source\.spm is not a sentencepiece model"),
    "corrupt weights": (_truncated, r"model\.safetensors cannot be read: it is damaged"),
    "foreign pickle": (_pickled, r"pytorch_model\.bin holds other types"),
    "not a state": (_not_torch, r"pytorch_model\.bin cannot be read: it is damaged"),
    "a tensor missing": (
        _weights(lambda t: t.pop("model.encoder.layers.1.fc1.bias")),
        r"it lacks model\.encoder\.layers\.1\.fc1\.bias",
    ),
    "a tensor too many": (
        _weights(lambda t: t.update({"bert.pooler": torch.zeros(2)})),
        r"it has bert\.pooler, which no such model has",
    ),
    "another shape": (_config(encoder_ffn_dim=50), r"has shape \(48, 32\), but config\.json asks for \(50, 32\)"),
    "more layers": (_config(decoder_layers=3), r"it lacks model\.decoder\.layers\.2"),
    "torn ties": (
        _weights(lambda t: t.update({"lm_head.weight": t["model.shared.weight"] + 1})),
        r"lm_head\.weight differs from model\.shared\.weight",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused(case: str, marian: tuple, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    breaking, sentence = BROKEN[case]
    folder = copy(marian[1], tmp_path / "hf")
    breaking(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as error:
        MarianFolder.open(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    assert main(["convert", "opus-mt", str(folder), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"attn-reg convert: {error.value}\n"
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}, "nothing is written"


def test_shared_embeddings_with_separate_vocabularies_are_refused(separate: tuple, tmp_path: Path) -> None:
    folder = copy(separate[1], tmp_path / "hf")
    edit(folder / "config.json", share_encoder_decoder_embeddings=True)
    with pytest.raises(ValueError, match="has separate vocabularies, but the embeddings are shared"):
        MarianFolder.open(folder)


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("renormalize", "banned", "expected"),
    [(True, True, True), (True, False, False), (False, True, False), (None, True, False)],
)
def test_search_renormalizes_where_the_folder_says_so(
    place: str, renormalize: bool | None, banned: bool, expected: bool, marian: tuple, tmp_path: Path
) -> None:
    """Older folders keep the settings of `generate` in the model's configuration."""
    folder = copy(marian[1], tmp_path / "hf")
    if place == "config.json":
        (folder / "generation_config.json").unlink()
    words = [[marian[0].config.pad_token_id]] if banned else None
    edit(folder / place, renormalize_logits=renormalize, bad_words_ids=words)
    to_fairseq(MarianFolder.open(folder), tmp_path / "out")
    assert ("--renormalize-search" in (tmp_path / "out" / FLAGS).read_text(encoding="utf-8")) is expected


def test_what_was_tuned_beside_the_conversion_goes_back(marian: tuple, tmp_path: Path) -> None:
    to_fairseq(MarianFolder.open(marian[1]), tmp_path / "out")
    state = torch.load(tmp_path / "out" / CHECKPOINT, weights_only=True)
    state["model"]["decoder.layers.0.fc1.bias"] += 1
    torch.save(state, tmp_path / "out" / "checkpoint_best.pt")
    to_huggingface(tmp_path / "out", tmp_path / "back")
    name = "model.decoder.layers.0.fc1.bias"
    before, after = (load_file(path / "model.safetensors")[name] for path in (marian[1], tmp_path / "back"))
    assert torch.equal(after, before + 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["A"], "HF_DIR and OUT_DIR must be given, not 1 folders"),
        (["A", "B", "--to-hf", "C"], "OUT_DIR alone must be given, not 2 folders"),
        (["B", "--to-hf", "C", "--hf-model", "D"], "cannot be given together"),
        (["A", "B", "--opus-mt", "C"], "--opus-mt belongs to --to-hf"),
        (["A", "B", "--languages", "en"], "--languages is 'en', but must be two different names"),
        (["A", "B"], "A: no such folder"),
        (["B", "--to-hf", "C"], "C has no checkpoint; looked for checkpoint_best.pt"),
    ],
)
def test_arguments_that_do_not_fit(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "opus-mt", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_model_that_cannot_be_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def unreachable(name: str, **_: object) -> str:
        raise ConnectionError(f"no route to {name}\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert main(["convert", "opus-mt", "--hf-model", "a/b", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "--hf-model a/b could not be downloaded (ConnectionError: no route to a/b)" in said


def test_a_model_is_downloaded(marian: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(marian[1]))
    assert main(["convert", "opus-mt", "--hf-model", "a/b", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / CHECKPOINT).is_file() and (tmp_path / "out" / "dict.ro.txt").is_file()


@pytest.fixture
def converted(marian: tuple, tmp_path: Path) -> Path:
    to_fairseq(MarianFolder.open(marian[1]), tmp_path / "converted")
    return tmp_path / "converted"


def test_an_output_that_is_there_is_kept(marian: tuple, converted: Path) -> None:
    before = (converted / CHECKPOINT).read_bytes()
    with pytest.raises(ValueError, match="exists already"):
        to_fairseq(MarianFolder.open(marian[1]), converted)
    assert (converted / CHECKPOINT).read_bytes() == before


def test_the_working_directory_may_be_the_output(
    marian: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fairseq", "hf"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "fairseq")
    assert main(["convert", "opus-mt", str(marian[1]), "."]) == 0
    assert Path(CHECKPOINT).is_file() and Path(FLAGS).is_file()
    monkeypatch.chdir(tmp_path / "hf")
    assert main(["convert", "opus-mt", "--to-hf", "../fairseq", "."]) == 0
    assert_same_tensors(load_file("model.safetensors"), load_file(Path(marian[1]) / "model.safetensors"))
    assert {path.name for path in tmp_path.iterdir()} == {"fairseq", "hf"}, "nothing is left over"


def _state(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit_state(folder: Path) -> None:
        state = torch.load(folder / CHECKPOINT, weights_only=True)
        change(state)
        torch.save(state, folder / CHECKPOINT)

    return edit_state


@pytest.mark.parametrize(
    ("breaking", "sentence"),
    [
        (lambda f: (f / CHECKPOINT).write_bytes(b"x"), "cannot be read: it is damaged"),
        (_state(lambda s: s.update(more=Foreign())), "holds other types than weights need"),
        (_state(lambda s: s.pop("model")), "is not a fairseq checkpoint"),
        (_state(lambda s: setattr(s["args"], "arch", "transformer")), "is a model of --arch transformer, and only"),
        (_state(lambda s: s["model"].pop("decoder.final_logits_bias")), r"it lacks decoder\.final_logits_bias"),
        (
            _state(lambda s: s["model"].update({"encoder.embed_tokens.weight": torch.zeros(549, 32)})),
            r"decoder\.embed_tokens\.weight differs from encoder\.embed_tokens\.weight, but Marian shares them",
        ),
        (_unlink("vocab.json"), "were not found .*: give --opus-mt"),
        (
            lambda f: edit(f / "config.json", d_model=64),
            r"has shape \(548, 32\), but config\.json asks for \(548, 64\)",
        ),
    ],
)
def test_a_run_that_cannot_be_turned_back(breaking: Callable, sentence: str, converted: Path, tmp_path: Path) -> None:
    breaking(converted)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        to_huggingface(converted, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.fixture
def sharded(marian: tuple, tmp_path: Path) -> Path:
    """The folder with its weights in several files and an index, as transformers writes large models."""
    folder = copy(marian[1], tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    marian[0].save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("model-0*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    return folder


def _into_bins(folder: Path) -> None:
    for path in folder.glob("model-0*.safetensors"):
        torch.save(
            load_file(path), folder / path.name.replace("model-", "pytorch_model-").replace("safetensors", "bin")
        )
        path.unlink()
    index = (folder / "model.safetensors.index.json").read_text(encoding="utf-8")
    (folder / "model.safetensors.index.json").unlink()
    index = index.replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
    (folder / "pytorch_model.bin.index.json").write_text(index, encoding="utf-8")


@pytest.mark.parametrize("bins", [False, True])
def test_weights_in_several_files(bins: bool, sharded: Path, marian: tuple) -> None:
    if bins:
        _into_bins(sharded)
    assert_same_tensors(MarianFolder.open(sharded).tensors, MarianFolder.open(marian[1]).tensors)


def _remap(folder: Path, name: str) -> None:
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["weight_map"]["final_logits_bias"] = name
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("breaking", "sentence"),
    [
        (
            lambda f: _remap(f, "../other.safetensors"),
            "names '../other.safetensors', which isn't a weight file in its own",
        ),
        (lambda f: _remap(f, "/etc/passwd"), "names '/etc/passwd', which isn't a weight file in its own"),
        (lambda f: _remap(f, "model-9.safetensors"), "has no model-9.safetensors, which model.safetensors.index.json"),
        (lambda f: _remap(f, 3), "holds no 'weight_map' of tensors to files"),
        (lambda f: edit(f / "model.safetensors.index.json", weight_map=None), "holds no 'weight_map'"),
        (lambda f: _remap(f, max(path.name for path in f.glob("model-0*"))), "lacks final_logits_bias, which"),
    ],
)
def test_an_index_that_does_not_fit(breaking: Callable, sentence: str, sharded: Path) -> None:
    breaking(sharded)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        MarianFolder.open(sharded)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_a_full_disk_leaves_nothing(
    back: bool,
    weights: bool,
    converted: Path,
    marian: tuple,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """torch and safetensors have errors of their own for it, and a copied file's error names the source."""
    source = ["--to-hf", str(converted)] if back else [str(marian[1])]
    before, limit = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    if weights:
        monkeypatch.setattr(opus_mt_convert, "copy_files", lambda *folders: None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        assert main(["convert", "opus-mt", *source, str(tmp_path / "new" / "out")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = capsys.readouterr().err
    assert str(tmp_path / "new" / "out") in error and error.count("\n") == 1 and ("larger" in error or "full" in error)
    assert sorted(tmp_path.iterdir()) == before
