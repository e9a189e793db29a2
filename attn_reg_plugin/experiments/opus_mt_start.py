"""The step `convert opus-mt`: the OPUS-MT model that a comparison starts from, converted once.

`OUT.name` beside the folder records what was converted there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.files import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class OpusMTStart:
    """The settings of the step `convert opus-mt`."""

    model: str = setting("folder of an OPUS-MT model, or its name on the Hugging Face hub")
    languages: str = setting("names of the languages in fairseq", metavar="SOURCE-TARGET")
    out: Path = setting("folder to write", metavar="DIR")


def convert_once(start: OpusMTStart) -> None:
    """Convert the model, unless that is done.

    Raises:
        ValueError: something else was converted there, or the model cannot be.
    """
    from attn_reg_plugin.opus_mt.conversion import CHECKPOINT, FLAGS, to_fairseq
    from attn_reg_plugin.opus_mt.download import download
    from attn_reg_plugin.opus_mt.marian_folder import MarianFolder

    record, wanted = start.out.with_name(f"{start.out.name}.name"), _to_convert(start)
    if start.out.is_dir() and any(start.out.iterdir()):
        _check_converted(start.out, record, wanted)
        if all((start.out / name).is_file() for name in (CHECKPOINT, FLAGS)):
            return
    folder = Path(start.model) if Path(start.model).is_dir() else download(start.model)
    start.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, wanted)
    source, _, target = start.languages.partition("-")
    to_fairseq(MarianFolder.open(folder), start.out, (source, target))


def _to_convert(start: OpusMTStart) -> dict[str, str]:
    """What a conversion is of, as its record has it: of a model's folder with a digest of the files."""
    from attn_reg_plugin.experiments.labelled_runs import digest_of

    folder, known = Path(start.model), {"model": start.model, "languages": start.languages}
    endings = (".json", ".spm", ".safetensors", ".bin")
    files = sorted(path for path in folder.iterdir() if path.suffix in endings) if folder.is_dir() else []
    return {**known, "files": digest_of(files)} if files else known


def _check_converted(out: Path, record: Path, wanted: dict[str, str]) -> None:
    """Refuse a folder that holds something else, as far as its record says that: of earlier versions a name alone."""
    if not record.is_file():
        raise ValueError(f"{out} isn't empty, and no {record.name} says what was converted there; give another --out")
    text = record.read_text(encoding="utf-8").strip()
    before = read_json(record) if text.startswith("{") else {"model": text}
    for name, value in wanted.items():
        known = before.get(name, value)
        if known != value:
            how = {
                "model": f"from {known}, not from {value}",
                "languages": f"with the languages {known}, not {value}",
                "files": f"from other files of {wanted['model']}",
            }
            raise ValueError(f"{out} was converted {how[name]}; give another --out")
