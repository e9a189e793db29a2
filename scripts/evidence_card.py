"""Whether a converted OPUS-MT model translates by fairseq-generate as the original does by transformers; BLEU of both:

    python scripts/evidence_card.py SOURCE... MODEL RUN > examples/evidence/opus_mt/card.json

RUN is an untuned run of examples/evidence/opus_mt.yaml, MODEL the folder that was converted, and each SOURCE the raw
sentences of a test set, `test.en` or `test1.en`. Both search with the folder's beam; fairseq stops at as many finished
translations, which transformers calls early stopping.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, MarianMTModel

from attn_reg_plugin.experiments.translation import score
from attn_reg_plugin.files import read_lines

BATCH = 16


@torch.no_grad()
def translated(sentences: list[str], folder: str) -> list[str]:
    """Translate by transformers, in order of length."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()
    order = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
    found = [""] * len(sentences)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        batch = tokenizer([sentences[number] for number in chosen], return_tensors="pt", padding=True, truncation=True)
        texts = tokenizer.batch_decode(model.generate(**batch, early_stopping=True), skip_special_tokens=True)
        for number, text in zip(chosen, texts, strict=True):
            found[number] = text
    return found


def measure(source: Path, folder: str, run: Path) -> dict[str, Any]:
    """Compare both translations of one test set, and score each on its references."""
    sentences = list(read_lines(source))
    [ours] = (run / "translations").glob(f"{source.stem}.[!r]*")
    references = list(read_lines(ours.with_name(f"{source.stem}.references{ours.suffix}")))
    theirs, ours = translated(sentences, folder), list(read_lines(ours))
    same = sum(left == right for left, right in zip(ours, theirs, strict=True))
    bleu = {name: score(texts, references)[0]["bleu"] for name, texts in (("fairseq", ours), ("transformers", theirs))}
    return {"sentences": len(sentences), "same": same, "bleu": bleu}


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    *sources, model, run = sys.argv[1:]
    print(json.dumps({Path(source).stem: measure(Path(source), model, Path(run)) for source in sources}, indent=2))
