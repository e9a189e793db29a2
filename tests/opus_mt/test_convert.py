"""From Hugging Face to fairseq and back: nothing is lost, and what does not fit is refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MarianMTModel

from attn_reg_plugin.cli import main
from attn_reg_plugin.opus_mt.conversion import CHECKPOINT, FLAGS, to_fairseq, to_huggingface
from attn_reg_plugin.opus_mt.marian_folder import MarianFolder
from tests.comparing import differing
from tests.opus_mt.folders import TINY, copy, edit, load_tokenizer, make_folder


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
    files = [load_file(one / "model.safetensors") for one in (folder, tmp_path / "back")]
    assert differing(*files) == [] and files[0]
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "back").iterdir()}
    first, second = (MarianMTModel.from_pretrained(path).eval() for path in (folder, tmp_path / "back"))
    assert differing(first.state_dict(), second.state_dict()) == []
    assert first.config.to_dict() == second.config.to_dict() | {"_name_or_path": first.config._name_or_path}
    second.save_pretrained(tmp_path / "again")
    assert differing(first.state_dict(), MarianMTModel.from_pretrained(tmp_path / "again").state_dict()) == []
    inputs = tokenizer(["the house is old.", "a nurse"], return_tensors="pt", padding=True)
    outputs = [model.float().generate(**inputs, max_length=12) for model in (first, second)]
    theirs, ours = tokenizer, load_tokenizer(tmp_path / "back")
    assert theirs.batch_decode(outputs[0]) == ours.batch_decode(outputs[1])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("encoder-attention-heads", 1),
        ("decoder-attention-heads", 1),
        ("activation-fn", "relu"),
        ("no-scale-embedding", True),
    ],
)
def test_a_model_of_another_function_does_not_go_back(marian: tuple, tmp_path: Path, flag: str, value: Any) -> None:
    """All tensors would fit: Marian would compute something else of them."""
    to_fairseq(MarianFolder.open(marian[1]), tmp_path / "run", ("en", "ro"))
    state = torch.load(tmp_path / "run" / CHECKPOINT, weights_only=True)
    setattr(state["args"], flag.replace("-", "_"), value)
    torch.save(state, tmp_path / "run" / CHECKPOINT)
    with pytest.raises(ValueError, match=f"was trained with --{flag} {value}, but config.json describes"):
        to_huggingface(tmp_path / "run", tmp_path / "back")
    assert not (tmp_path / "back").exists()


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
    assert differing(*states) == []


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


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(("renormalize", "banned"), [(True, True), (True, False), (None, True)])
def test_search_renormalizes_where_the_folder_says_so(
    place: str, renormalize: bool | None, banned: bool, marian: tuple, tmp_path: Path
) -> None:
    """Older folders keep the settings of `generate` in the model's configuration."""
    folder = copy(marian[1], tmp_path / "hf")
    if place == "config.json":
        (folder / "generation_config.json").unlink()
    words = [[marian[0].config.pad_token_id]] if banned else None
    edit(folder / place, renormalize_logits=renormalize, bad_words_ids=words)
    to_fairseq(MarianFolder.open(folder), tmp_path / "out")
    found = "--renormalize-search" in (tmp_path / "out" / FLAGS).read_text(encoding="utf-8")
    assert found is bool(renormalize and banned)


def test_the_other_direction_is_refused(marian: tuple, tmp_path: Path) -> None:
    folder = MarianFolder.open(marian[1])
    with pytest.raises(ValueError, match=r"translates from en to ro, not ro-en$"):
        to_fairseq(folder, tmp_path / "out", ("ro", "en"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["A"], "OUT is missing: folder to write"),
        (["A", "B", "C"], "unrecognized arguments: C"),
        (["A", "B", "--languages", "en"], "--languages is 'en', but must be two different names"),
        (["A", "B", "--languages", "e.n-tr"], "--languages is 'e.n-tr', but must be two different names"),
        (["A", "B", "--to-hf", "--languages", "en-tr"], "--languages belongs to a conversion without --to-hf"),
        (["A", "B"], "A: no such folder"),
        (["C", "B", "--to-hf"], "C has no checkpoint; looked for checkpoint_best.pt"),
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
    assert main(["convert", "opus-mt", "a/b", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "the model a/b could not be downloaded (ConnectionError: no route to a/b)" in said
