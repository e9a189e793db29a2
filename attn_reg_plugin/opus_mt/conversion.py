"""OPUS-MT models to fairseq and back: names, the order of the vocabulary, and the files around the weights.

Hugging Face's Marian and fairseq's Transformer name their parts alike, so a conversion is a renaming and a
permutation of the embedding's rows; every tensor goes there and back bit for bit, in the precision it has.
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_reg_plugin.checkpoints import find_checkpoint, load_checkpoint, settings_in
from attn_reg_plugin.files import naming_writer, whole_folder, write_json, write_text
from attn_reg_plugin.opus_mt import marian_folder as marian
from attn_reg_plugin.opus_mt import tokenization as text
from attn_reg_plugin.opus_mt.marian_folder import BIAS, MarianFolder
from attn_reg_plugin.opus_mt.tokenization import CONFIG, OpusMTTokenizer, Vocabulary, copy_files, write_dictionaries

ARCHITECTURE = "opus_mt"
CHECKPOINT, FLAGS = "checkpoint.pt", "fairseq.flags"
#: fairseq counts padding and `</s>` as positions too, and its own default is this
MIN_POSITIONS = 1024
_ROWS = {
    marian.SHARED: ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight"),
    marian.ENCODER: ("encoder.embed_tokens.weight",),
    marian.DECODER: ("decoder.embed_tokens.weight", "decoder.output_projection.weight"),
    BIAS: ("decoder.final_logits_bias",),
}
#: flag of a stack → the configuration's name for it
_SIZES = {"layers": "{}_layers", "embed-dim": "d_model", "ffn-embed-dim": "{}_ffn_dim"}
_SIZES |= {"attention-heads": "{}_attention_heads", "layerdrop": "{}_layerdrop"}
#: flags that change no tensor → what stands where they are not given
_SHAPELESS = {"encoder-attention-heads": 8, "decoder-attention-heads": 8, "activation-fn": "swish"}
_SHAPELESS |= {"no-scale-embedding": False}
_BEST_FIRST = ("checkpoint_best.pt", "checkpoint_last.pt", CHECKPOINT)


def architecture(path: Path) -> dict[str, Any]:
    """Map the flags of fairseq-train that a `config.json` asks for, without dashes → values; True for a switch."""
    config = marian.read_config(path)
    flags: dict[str, Any] = {}
    for stack in ("encoder", "decoder"):
        flags |= {f"{stack}-{flag}": getattr(config, name.format(stack)) for flag, name in _SIZES.items()}
    shared = config.share_encoder_decoder_embeddings
    flags["share-all-embeddings" if shared else "share-decoder-input-output-embed"] = True
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        flags[name.replace("_", "-")] = getattr(config, name)
    positions = max(config.max_position_embeddings, MIN_POSITIONS)
    flags |= {"max-source-positions": positions, "max-target-positions": positions}
    activation = marian.ACTIVATIONS[config.activation_function]
    flags |= {} if config.scale_embedding else {"no-scale-embedding": True}
    flags |= {"renormalize-search": True} if marian.renormalizes(path) else {}
    # swish is the default of the architecture, and fairseq's parser does not know it
    return flags if activation == "swish" else flags | {"activation-fn": activation}


def _vocabulary_of(name: str, tokenizer: OpusMTTokenizer) -> Vocabulary:
    """Choose the vocabulary whose order the rows of a tensor have."""
    return (tokenizer.source if name in (marian.SHARED, marian.ENCODER) else tokenizer.target).vocabulary


def fairseq_state(folder: MarianFolder) -> dict[str, Tensor]:
    """Make the state of the fairseq model: fairseq's name → tensor."""
    state = {f"{stack}.version": torch.tensor([3.0]) for stack in ("encoder", "decoder")}
    for name, tensor in folder.tensors.items():
        if name not in _ROWS:
            state[name.removeprefix("model.")] = tensor
            continue
        rows = tensor.flatten() if name == BIAS else tensor
        chosen = rows[_vocabulary_of(name, folder.tokenizer).order]
        whole = torch.cat([torch.zeros_like(chosen[:1]), chosen])  # fairseq's <s> first
        state |= dict.fromkeys(_ROWS[name], whole)
    return state


def marian_tensors(path: Path, state: dict[str, Tensor], config: Any, tokenizer: OpusMTTokenizer) -> dict[str, Tensor]:
    """Turn back what `fairseq_state` made of a checkpoint at a path: Hugging Face's name → tensor.

    Raises:
        ValueError: the state is not of the model that the configuration describes, or its embeddings have come apart.
    """
    rows = {name: others for name, others in _ROWS.items() if name == BIAS or name in marian.embeddings(config)}
    tensors = {}
    for name, (first, *others) in rows.items():
        missing = next((other for other in (first, *others) if other not in state), None)
        if missing:
            raise ValueError(f"{path} is not of the Marian model that {CONFIG} describes: it lacks {missing}")
        tensor, order = state[first], _vocabulary_of(name, tokenizer).order
        for other in others:
            if not torch.equal(state[other], tensor):
                raise ValueError(
                    f"{path}: {other} differs from {first}, but Marian shares them; train with the flags of {FLAGS}"
                )
        if len(tensor) != len(order) + 1:
            raise ValueError(f"{path}: {first} has {len(tensor)} rows, but the vocabulary asks {len(order) + 1}")
        tensors[name] = torch.empty_like(tensor[1:])
        tensors[name][order] = tensor[1:]
    tensors[BIAS] = tensors[BIAS][None]
    tensors |= {f"model.{name}": tensor for name, tensor in state.items() if ".layers." in name}
    return marian.checked(path, tensors, config)


def to_fairseq(folder: MarianFolder, out: Path, languages: tuple[str, str] | None = None) -> tuple[str, str]:
    """Write a fairseq checkpoint, dictionaries, and what the tokenizer and the way back need.

    Args:
        folder: the OPUS-MT model.
        out: a folder that does not exist, or is empty.
        languages: source and target, as fairseq is to call them; by default as the tokenizer does. They are returned.

    Raises:
        ValueError: `out` holds something, or is a file; the model translates the other way round.
        OSError: `out` cannot be written; nothing is left there.
    """
    named = folder.tokenizer.languages
    folder.tokenizer.refuse_reversed(languages)
    languages = languages or (named if all(named) and named[0] != named[1] else ("source", "target"))
    flags = ["--arch", ARCHITECTURE]
    for name, value in architecture(folder.path / CONFIG).items():
        flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    with whole_folder(out) as staging:
        copy_files(folder.path, staging)
        write_dictionaries(folder.tokenizer, [staging / f"dict.{language}.txt" for language in languages])
        write_text(staging / FLAGS, shlex.join(flags) + "\n")
        with naming_writer(out):
            torch.save(_checkpoint(folder, languages), staging / CHECKPOINT)
    return languages


def _checkpoint(folder: MarianFolder, languages: tuple[str, str]) -> dict[str, Any]:
    """Make a checkpoint as fairseq reads it, of a training that has not begun."""
    flags = {name.replace("-", "_"): value for name, value in architecture(folder.path / CONFIG).items()}
    args = argparse.Namespace(
        arch=ARCHITECTURE, task="translation", source_lang=languages[0], target_lang=languages[1], data="", **flags
    )
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": args,
        "cfg": None,
        "model": fairseq_state(folder),
        "criterion": None,
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "version": 2, "iterations_in_epoch": 0, "shuffle": True}},
        "last_optimizer_state": None,
    }


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a fairseq checkpoint of this architecture.

    Raises:
        ValueError: it is damaged, holds types that are not allowed, or is of another architecture.
    """
    state = load_checkpoint(path)
    settings = settings_in(state, "model")
    found = getattr(settings, "arch", getattr(settings, "_name", None))
    if found != ARCHITECTURE:
        raise ValueError(f"{path} is a model of --arch {found}, and only {ARCHITECTURE} can be converted back")
    return state


def find_files(run: Path, checkpoint: Path, state: dict[str, Any], given: Path | None) -> Path:
    """Find the folder with the tokenizer and the configuration that belong to a checkpoint.

    Args:
        given: what the user said, which wins.

    Raises:
        FileNotFoundError: there is none.
    """
    data = str(getattr(settings_in(state, "task"), "data", "") or "")
    prepared = [Path(data) / "opus_mt", Path(data).parent / "opus_mt"] if data else []
    for folder in [given] if given else [run, checkpoint.parent, *prepared]:
        if (folder / CONFIG).is_file() and (folder / text.VOCABULARY).is_file():
            return folder
    where = str(given) if given else f"neither beside {checkpoint} nor beside its data {data or '(none)'}"
    raise FileNotFoundError(
        f"{CONFIG} and {text.VOCABULARY} of the model were not found ({where}): give --opus-mt, the folder that "
        "`attn-reg convert opus-mt` wrote"
    )


def check_function(checkpoint: Path, state: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint that computes another function of its weights than the configuration in the folder says.

    Raises:
        ValueError: it was trained with another number of heads, scale of embeddings or activation.
    """
    settings, asked = settings_in(state, "model"), architecture(folder / CONFIG)
    for flag, usual in _SHAPELESS.items():
        found = getattr(settings, flag.replace("-", "_"), usual)
        if found != asked.get(flag, usual):
            raise ValueError(
                f"{checkpoint} was trained with --{flag} {found}, but {CONFIG} describes {asked.get(flag, usual)}; "
                f"train with the flags of {FLAGS}"
            )


def to_huggingface(run: Path, out: Path, files: Path | None = None) -> None:
    """Write a fairseq checkpoint as an OPUS-MT folder that `MarianMTModel.from_pretrained` loads.

    Args:
        run: a checkpoint, or a folder with one.
        out: a folder that does not exist, or is empty.
        files: the folder with the tokenizer and the configuration; by default it is looked for.

    Raises:
        FileNotFoundError: something is missing.
        ValueError: the checkpoint is not of a converted model, or `out` cannot be used.
    """
    from safetensors.torch import save_file

    checkpoint = find_checkpoint(run, _BEST_FIRST)
    state = read_checkpoint(checkpoint)
    folder = find_files(run, checkpoint, state, files)
    check_function(checkpoint, state, folder)
    tokenizer = OpusMTTokenizer(folder)
    tensors = marian_tensors(checkpoint, state["model"], marian.read_config(folder / CONFIG), tokenizer)
    config = text.read_json(folder / CONFIG)
    precision = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config |= {key: precision for key in ("dtype", "torch_dtype") if key in config}
    with whole_folder(out) as staging:
        copy_files(folder, staging)
        write_json(staging / CONFIG, config)
        with naming_writer(out):
            save_file(tensors, staging / marian.WEIGHTS[0], metadata={"format": "pt"})
