"""OPUS-MT models from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from attn_reg_plugin.opus_mt.marian_folder import WEIGHTS


def download(name: str) -> Path:
    """A model of the hub in the local cache.

    Raises:
        ValueError: it cannot be downloaded.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError("--hf-model needs huggingface_hub: pip install huggingface_hub") from None
    try:
        for stem, _, ending in (weights.partition(".") for weights in WEIGHTS):  # one file, or several and an index
            small = snapshot_download(
                name, allow_patterns=["*.json", "*.spm", f"{stem}.{ending}", f"{stem}-*.{ending}"]
            )
            if any(Path(small).glob(f"{stem}*.{ending}")):
                break
    except Exception as error:  # no network, no such model, no disk: the hub has its own error for each
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ValueError(f"--hf-model {name} could not be downloaded ({type(error).__name__}: {reason})") from None
    return Path(small)
