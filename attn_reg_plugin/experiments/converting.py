"""`attn-reg convert opus-mt`: OPUS-MT models of the hub into fairseq, once, and back; `attn-reg export`: encoders.

`OUT.name` beside a converted folder records what was converted there.
"""

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.dictionaries import is_pair
from attn_reg_plugin.experiments.data_folder import digest_of
from attn_reg_plugin.files import naming_writer, read_json, whole_folder, write_json

#: a model of the hub
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
#: the files of a model that are recorded
_ENDINGS = (".json", ".spm", ".safetensors", ".bin")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The settings of `attn-reg convert opus-mt`."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg convert opus-mt Helsinki-NLP/opus-mt-en-ro models/en-ro",
        "attn-reg convert opus-mt --to-hf runs/en-ro/ad_drop-seed1 exported",
    )

    model: str = setting(
        "folder of an OPUS-MT model, or its name on the Hugging Face hub; with --to-hf a checkpoint or run",
        metavar="MODEL",
        positional=True,
    )
    out: Path = setting("folder to write", metavar="OUT", positional=True)
    languages: str | None = setting(
        "names of the languages in fairseq (default: the tokenizer's, or source-target)", None, metavar="SOURCE-TARGET"
    )
    to_hf: bool = setting("convert a training's checkpoint back", False)
    opus_mt: Path | None = setting(
        "with --to-hf: the converted folder the model comes from (default: looked for beside the run and its data)",
        None,
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        """Check what goes together."""
        if self.opus_mt and not self.to_hf:
            raise ValueError("--opus-mt belongs to --to-hf")
        if self.languages is not None and self.to_hf:
            raise ValueError("--languages belongs to a conversion without --to-hf")
        if self.languages is not None and not is_pair(self.languages):
            said = "but must be two different names with a hyphen, as en-ro"
            raise ValueError(f"--languages is {self.languages!r}, {said}")

    def carry_out(self) -> None:
        """Convert the model, unless that is done; a folder of something else is refused."""
        from attn_reg_plugin.opus_mt.conversion import CHECKPOINT, FLAGS, to_fairseq, to_huggingface
        from attn_reg_plugin.opus_mt.marian_folder import MarianFolder, download

        if self.to_hf:
            to_huggingface(Path(self.model), self.out, self.opus_mt)
            print(f'wrote {self.out}: MarianMTModel.from_pretrained("{self.out}")')
            return
        folder, out = Path(self.model), Path(os.path.abspath(self.out))  # "." has no name of its own
        record = out.with_name(f"{out.name}.name")
        wanted = {"model": self.model, **({"languages": self.languages} if self.languages else {})}
        if folder.is_dir():
            wanted["files"] = digest_of(sorted(path for path in folder.iterdir() if path.suffix in _ENDINGS))
        if self.out.is_dir() and any(self.out.iterdir()):
            if not record.is_file():
                said = f"isn't empty, and no {record.name} says what was converted there"
                raise ValueError(f"{self.out} {said}; give another OUT")
            before = read_json(record)
            same_files = "files" in before.keys() & wanted.keys()  # which say more than where they are
            for name, value in wanted.items():
                if before.get(name) not in (None, value) and not (name == "model" and same_files):
                    said = f"was converted with {name} {before[name]}, not {value}"
                    raise ValueError(f"{self.out} {said}; give another OUT")
            print(f"already converted: {self.out}")
            return
        if not folder.is_dir() and _HUB.fullmatch(self.model):
            folder = download(self.model)
        languages = tuple(self.languages.split("-")) if self.languages else None
        source, target = to_fairseq(MarianFolder.open(folder), self.out, languages)
        write_json(record, {**wanted, "languages": f"{source}-{target}"})
        checkpoint = shlex.quote(str(self.out / CHECKPOINT))
        print(f"wrote {self.out}: {source} to {target}; fairseq-train ... --finetune-from-model {checkpoint} with")
        print((self.out / FLAGS).read_text("utf-8").strip())


@dataclass(frozen=True, kw_only=True)
class Export:
    """The settings of `attn-reg export`."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg export runs/rte/ad_drop-seed1 exported",
        "attn-reg export checkpoints/checkpoint_best.pt exported",
    )

    run_folder: Path = setting(
        "folder of a training with --arch hf_encoder (its best checkpoint is taken), or a checkpoint in it",
        metavar="RUN",
        positional=True,
    )
    out: Path = setting("folder to write; must be empty or not there yet", metavar="OUT", positional=True)

    def carry_out(self) -> None:
        """Write model and tokenizer; on an error nothing is left there."""
        from attn_reg_plugin.experiments.trained import load_trained

        with whole_folder(self.out) as folder:
            trained = load_trained(self.run_folder)
            if trained.model.mean_pooled:
                raise ValueError(f"{self.run_folder}: transformers has no head for --pooling mean")
            trained.tokenizer.model_max_length = trained.longest
            with naming_writer(self.out):
                trained.model.model.save_pretrained(folder)
                trained.tokenizer.save_pretrained(folder)
        print(f"{self.out}: {type(trained.model.model).__name__} of {trained.checkpoint}, with its tokenizer")


def exported(run: Path) -> Path:
    """Return the folder for `from_pretrained` of a run; one of `attn-reg finetune` is exported into it first."""
    if (run / "config.json").is_file():
        return run
    if not (run / "exported").is_dir():
        Export(run_folder=run, out=run / "exported").carry_out()
    return run / "exported"
