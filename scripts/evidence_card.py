"""Whether fairseq-generate with a converted OPUS-MT model translates as transformers with the original; BLEU of both:

    python scripts/evidence_card.py MODEL RUN... > examples/evidence/card.json

RUN are untuned runs of examples/evidence/opus_mt.yaml, MODEL is the folder that was converted. Both search with the
folder's beam; fairseq stops at as many finished translations, which transformers calls early stopping.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from evidence_runs import of_runs
from transformers import AutoTokenizer, MarianMTModel

from attn_reg_plugin.experiments.data_folder import DataFolder
from attn_reg_plugin.experiments.translation import score
from attn_reg_plugin.files import raw_lines, read_json

BATCH = 16


@torch.no_grad()
def translated(model: MarianMTModel, tokenizer: Any, sentences: Sequence[str]) -> list[str]:
    """Translate by transformers, in order of length."""
    found: dict[int, str] = {}
    order = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        batch = tokenizer([sentences[number] for number in chosen], return_tensors="pt", padding=True, truncation=True)
        written = model.generate(**batch, early_stopping=True)
        found.update(zip(chosen, tokenizer.batch_decode(written, skip_special_tokens=True), strict=True))
    return [found[number] for number in range(len(sentences))]


def measure(run: Path, folder: str) -> dict[str, Any]:
    """Count the sentences of each test set and those that both translate alike, and take BLEU on raw references."""
    data = DataFolder.open(Path(read_json(run / "run.json")["paths"]["data"]).parent)
    model, tokenizer = MarianMTModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    found = {}
    for subset in data.subsets:
        ours = raw_lines(run / "translations" / f"{subset}.{data.target}")
        theirs = translated(model.eval(), tokenizer, raw_lines(data.root / "raw" / f"{subset}.{data.source}"))
        texts = {"fairseq": ours, "transformers": theirs}
        bleu = {name: score(lines, data.references(subset), data.target)[0]["bleu"] for name, lines in texts.items()}
        same = sum(left == right for left, right in zip(ours, theirs, strict=True))
        found[subset] = {"sentences": len(ours), "same": same, "bleu": bleu}
    return found


if __name__ == "__main__":
    print(json.dumps(of_runs(measure, __doc__), indent=2))
