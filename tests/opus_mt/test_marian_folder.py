"""Folders of weights: in several files too, and what does not fit is refused in one sentence."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attn_reg_plugin.cli import main
from attn_reg_plugin.opus_mt.conversion import CHECKPOINT, to_huggingface
from attn_reg_plugin.opus_mt.marian_folder import MarianFolder
from tests.opus_mt.folders import copy, edit


def _unlink(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _weights(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit_weights(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit_weights


class Foreign:
    """A class that no weight file needs."""


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
    "no config": (_unlink("config.json"), r"hf/config\.json"),
    "no source model": (_unlink("source.spm"), r"has no source\.spm"),
    "no weights": (_unlink("model.safetensors"), r"neither model\.safetensors nor pytorch_model\.bin"),
    "vocabulary too large": (_larger, r"vocab\.json has 549 pieces, but by .*config\.json the embedding has 548 rows"),
    "another padding": (_other_padding, r"numbers '<pad>' 0, but by .* decoding starts from 547"),
    "not marian": (_config(model_type="bart"), r"config\.json is of model type 'bart', not 'marian'"),
    "another activation": (_config(activation_function="mish"), r"activation_function 'mish' is not one of swish"),
    "untied": (_config(tie_word_embeddings=False), "tie_word_embeddings is false"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
    "model no model": (
        lambda f: (f / "source.spm").write_bytes(b"x"),
        r"has a tokenizer that transformers cannot load \(.*source\.spm",
    ),
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
    assert main(["convert", "opus-mt", str(folder), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.search(sentence, error) and str(folder) in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}, "nothing is written"


def test_shared_embeddings_with_separate_vocabularies_are_refused(separate: tuple, tmp_path: Path) -> None:
    folder = copy(separate[1], tmp_path / "hf")
    edit(folder / "config.json", share_encoder_decoder_embeddings=True)
    with pytest.raises(ValueError, match="has separate vocabularies, but the embeddings are shared"):
        MarianFolder.open(folder)


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
        (_state(lambda s: s.pop("model")), "is not a fairseq checkpoint"),
        (_state(lambda s: setattr(s["args"], "arch", "transformer")), "is a model of --arch transformer, and only"),
        (_state(lambda s: s["model"].pop("decoder.final_logits_bias")), r"it lacks decoder\.final_logits_bias"),
        (
            _state(lambda s: s["model"].update({"encoder.embed_tokens.weight": torch.zeros(549, 32)})),
            r"decoder\.embed_tokens\.weight differs from encoder\.embed_tokens\.weight, but Marian shares them",
        ),
        (_unlink("vocab.json"), "were not found .*: give --opus-mt"),
    ],
)
def test_a_run_that_cannot_be_turned_back(breaking: Callable, sentence: str, converted: Path, tmp_path: Path) -> None:
    folder = copy(converted, tmp_path / "converted")
    breaking(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        to_huggingface(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()
