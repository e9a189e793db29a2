"""`attn-reg convert opus-mt`: OPUS-MT models of the Hugging Face hub into fairseq, and back.

attn-reg convert opus-mt HF_DIR OUT_DIR
attn-reg convert opus-mt --hf-model Helsinki-NLP/opus-mt-en-ro OUT_DIR
attn-reg convert opus-mt --to-hf RUN OUT_DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = (
    "attn-reg convert opus-mt --hf-model Helsinki-NLP/opus-mt-en-ro models/en-ro",
    "attn-reg convert opus-mt --to-hf runs/en-ro/ad_drop-seed1 exported",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attn-reg convert`."""
    families = parser.add_subparsers(dest="family", required=True, metavar="FAMILY")
    opus = families.add_parser(
        "opus-mt",
        help="OPUS-MT (Marian) translation models",
        usage="attn-reg convert opus-mt [HF_DIR | --hf-model NAME | --to-hf RUN] OUT_DIR [options]",
        description="OPUS-MT (Marian) translation models into fairseq, or with --to-hf back.",
    )
    opus.add_argument("folders", nargs="+", type=Path, metavar="HF_DIR OUT_DIR", help="the model, and what to write")
    opus.add_argument("--hf-model", metavar="NAME", help="download the model from the Hugging Face hub")
    opus.add_argument("--to-hf", type=Path, metavar="RUN", help="a fairseq checkpoint or run, to convert back")
    opus.add_argument(
        "--opus-mt",
        type=Path,
        metavar="DIR",
        help="with --to-hf: the converted folder the model comes from (default: looked for beside RUN and its data)",
    )
    opus.add_argument(
        "--languages",
        metavar="SOURCE-TARGET",
        help="names of the languages in fairseq (default: the tokenizer's, or source-target)",
    )


def run(arguments: argparse.Namespace) -> int:
    """The command: 0 once everything is written.

    Raises:
        ValueError: arguments that do not go together, or a model that cannot be converted.
        FileNotFoundError: something is missing.
    """
    from attn_reg_plugin.opus_mt import conversion as convert
    from attn_reg_plugin.opus_mt.marian_folder import MarianFolder, download

    if arguments.to_hf and arguments.hf_model:
        raise ValueError("--to-hf and --hf-model cannot be given together")
    if arguments.opus_mt and not arguments.to_hf:
        raise ValueError("--opus-mt belongs to --to-hf")
    wanted = 1 if arguments.to_hf or arguments.hf_model else 2
    if len(arguments.folders) != wanted:
        what = "OUT_DIR alone" if wanted == 1 else "HF_DIR and OUT_DIR"
        raise ValueError(f"{what} must be given, not {len(arguments.folders)} folders")
    out = arguments.folders[-1]
    if arguments.to_hf:
        convert.to_huggingface(arguments.to_hf, out, arguments.opus_mt)
        print(f'wrote {out}: MarianMTModel.from_pretrained("{out}")')
        return 0
    languages = _languages(arguments.languages)
    folder = download(arguments.hf_model) if arguments.hf_model else arguments.folders[0]
    source, target = convert.to_fairseq(MarianFolder.open(folder), out, languages)
    print(f"wrote {out}: {source} to {target}; fairseq-train ... --finetune-from-model {out / convert.CHECKPOINT} with")
    print((out / convert.FLAGS).read_text(encoding="utf-8").strip())
    return 0


def _languages(given: str | None) -> tuple[str, str] | None:
    if given is None:
        return None
    source, _, target = given.partition("-")
    if not source or not target or source == target or "-" in target:
        raise ValueError(f"--languages is {given!r}, but must be two different names with a hyphen, as en-ro")
    return source, target
