"""The step `convert opus-mt`: the OPUS-MT model that a comparison starts from, converted once.

`OUT.name` beside the folder records what was converted there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.experiments.data_folder import digest_of
from attn_reg_plugin.files import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class OpusMTStart:
    """The settings of the step `convert opus-mt`."""

    model: str = setting("folder of an OPUS-MT model, or its name on the Hugging Face hub")
    languages: str = setting("names of the languages in fairseq", metavar="SOURCE-TARGET")
    out: Path = setting("folder to write", metavar="DIR")


def convert_once(start: OpusMTStart) -> None:
    """Convert the model, unless that is done; a folder of something else is refused."""
    from attn_reg_plugin.opus_mt.conversion import CHECKPOINT, FLAGS, to_fairseq
    from attn_reg_plugin.opus_mt.marian_folder import MarianFolder, download

    given = Path(start.model)
    record, wanted = start.out.with_name(f"{start.out.name}.name"), {"model": start.model, "languages": start.languages}
    if given.is_dir():
        endings = (".json", ".spm", ".safetensors", ".bin")
        wanted["files"] = digest_of(sorted(path for path in given.iterdir() if path.suffix in endings))
    if start.out.is_dir() and any(start.out.iterdir()):
        if not record.is_file():
            said = f"isn't empty, and no {record.name} says what was converted there"
            raise ValueError(f"{start.out} {said}; give another --out")
        before = read_json(record)
        for name, value in wanted.items():
            if before.get(name, value) != value:
                said = f"was converted with {name} {before[name]}, not {value}"
                raise ValueError(f"{start.out} {said}; give another --out")
        if all((start.out / name).is_file() for name in (CHECKPOINT, FLAGS)):
            return
    start.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, wanted)
    source, _, target = start.languages.partition("-")
    to_fairseq(MarianFolder.open(given if given.is_dir() else download(start.model)), start.out, (source, target))
