"""chrF (Popovic, 2015) of a translation task's validation set, by sacrebleu, to choose checkpoints by.

As fairseq's own --eval-bleu: every batch is translated, each rank logs its counts of character n-grams, and the score
is that of the sums, so it does not depend on batches and ranks.
"""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from typing import Any

import numpy as np
import torch
from fairseq import metrics, utils
from fairseq.data import encoders

#: what a batch logs starts with this
_PREFIX = "_chrf_"
#: an unknown piece of a translation and of a reference: characters of no text, so they match nothing, nor each other
_UNKNOWN, _UNKNOWN_GOLD = "\ue000", "\ue001"


class ValidationChrF:
    """Translates batches, counts character n-grams, and logs the score as `chrf` (0 to 100).

    Raises:
        ValueError: sacrebleu isn't installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("sacrebleu") is None:
            raise ValueError("--eval-chrf needs sacrebleu, which is not installed: pip install sacrebleu")
        from sacrebleu.metrics import CHRF

        self.metric = CHRF()
        self.generator: Any = None
        self.tokenizer: Any = None

    def prepare(self, task: Any, model: torch.nn.Module) -> None:
        """Make what translates, of the settings of --eval-bleu."""
        cfg = task.cfg
        detokenizer = json.loads(cfg.eval_bleu_detok_args or "{}")
        self.tokenizer = encoders.build_tokenizer(Namespace(tokenizer=cfg.eval_bleu_detok, **detokenizer))
        self.generator = task.build_generator([model], Namespace(**json.loads(cfg.eval_bleu_args or "{}")))

    def of_batch(self, task: Any, sample: dict[str, Any], model: torch.nn.Module) -> dict[str, float]:
        """The counts of a batch, summed over its sentences, by the names under which they are logged."""
        found = task.inference_step(self.generator, [model], sample, prefix_tokens=None)
        targets = [utils.strip_pad(target, task.target_dictionary.pad()) for target in sample["target"]]
        hypotheses = [self._text(task, best[0]["tokens"], _UNKNOWN) for best in found]
        references = [self._text(task, target, _UNKNOWN_GOLD) for target in targets]
        counts = self.metric._extract_corpus_statistics(hypotheses, [references])  # (sentences, counts)
        return {f"{_PREFIX}{place}": float(count) for place, count in enumerate(np.sum(counts, axis=0))}

    def _text(self, task: Any, tokens: torch.Tensor, unknown: str) -> str:
        text = task.target_dictionary.string(tokens.int().cpu(), task.cfg.eval_bleu_remove_bpe, unk_string=unknown)
        return self.tokenizer.decode(text) if self.tokenizer else text

    def log(self, logging_outputs: list[dict[str, Any]]) -> None:
        """Add up what batches and ranks logged; of training steps there is nothing."""
        names = sorted({name for log in logging_outputs for name in log if name.startswith(_PREFIX)}, key=_place)
        if not names:
            return
        sums = [sum(float(log.get(name, 0)) for log in logging_outputs) for name in names]
        metrics.log_scalar("_chrf", np.array(sums))
        metrics.log_derived("chrf", lambda meters: self.score(meters["_chrf"].sum))

    def score(self, counts: np.ndarray) -> float:
        """chrF of counts, (18,): of each order of n-grams those of the translations, of the references, and shared."""
        return round(self.metric._compute_score_from_stats([round(count) for count in counts.tolist()]).score, 2)


def _place(name: str) -> int:
    return int(name.removeprefix(_PREFIX))
