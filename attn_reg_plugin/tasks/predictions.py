"""fairseq's outputs in the form that objectives read: logits, real tokens and targets.

Most models give (logits, extra) and need nothing of this. The others are put into that form, and outputs without logits
are refused in the words of the command line.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.regularizers.ad_drop.objectives import Objective

NEED_NO_PREDICTION = (
    "use --attn-reg attention_layer_drop or scheduled_dropout, or --ad-drop-attribution random, which need none"
)


def reads_predictions(regularizer: Regularizer) -> bool:
    """Tell whether the method runs an objective on the model's outputs."""
    return getattr(regularizer, "objective", None) is not None and getattr(regularizer, "attribution", "") != "random"


class FairseqObjective:
    """A method's objective, on the outputs of any of fairseq's models.

    - adaptive softmax: the decoder's features become the log-probabilities of the whole vocabulary, (B, T, V);
    - masked LM: the logits of the N masked tokens, (N, V), are tokens and no classes: (1, N, V);
    - NAT, CMLM, insertion and Levenshtein Transformers: `word_ins`' logits, mask and targets;
    - wav2vec 2.0 and HuBERT with CTC: the logits of the frames, (T, B, V), as (B, T, V).

    Args:
        objective: the method's.
        labels: `pseudo` or `gold`.
        padding: the number of padding in the vocabulary, which is never meant.
        who: the model and the task, for messages.
    """

    def __init__(self, objective: Objective, labels: str, padding: int | None, who: str) -> None:
        self.objective, self.labels, self.padding, self.who = objective, labels, padding, who

    def __call__(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return F, see `ad_drop.objectives`; refuse outputs without logits by the flags that help."""
        logits, inputs = self._readable(outputs, dict(inputs))
        targets = inputs.get("targets")
        if self.labels == "gold" and isinstance(targets, Tensor) and targets.is_floating_point() and _tokens(logits):
            shares = (torch.log_softmax(logits.float(), -1) * targets).sum(-1)  # of each label, (B, T, V)
            return (shares * inputs["token_mask"]).sum()
        try:
            return self.objective(logits, inputs)
        except ValueError as error:
            missing = self.labels == "gold" and targets is None
            advice = "--ad-drop-labels pseudo" if missing else NEED_NO_PREDICTION
            raise ValueError(f"{self.who}: {error} (on the command line, {advice})") from error

    def _readable(self, outputs: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if isinstance(outputs, Mapping) and "word_ins" in outputs:
            words = outputs["word_ins"]
            return words["out"], inputs | {"targets": words["tgt"], "token_mask": words["mask"]}
        if isinstance(outputs, Mapping) and _tokens(outputs.get("encoder_out")) and "padding_mask" in outputs:
            logits, padded = outputs["encoder_out"].transpose(0, 1), outputs["padding_mask"]
            real = None if padded is None or padded.shape != logits.shape[:-1] else ~padded
            for name in ("targets", "labels"):  # of the text, not of the frames
                inputs.pop(name, None)
            return logits, inputs | {"token_mask": real}
        first = outputs[0] if isinstance(outputs, tuple | list) and outputs else None
        if not isinstance(first, Tensor):
            return outputs, inputs
        if inputs.get("adaptive_softmax") is not None and first.dim() == 3:
            return adaptive_log_probabilities(inputs["adaptive_softmax"], first), inputs
        return self._masked(first, inputs) if "masked_tokens" in inputs else (outputs, inputs)

    def _masked(self, logits: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Read a masked LM: (N, V) logits of masked tokens only, or (B, T, V) where none is masked."""
        masked, targets = inputs["masked_tokens"], inputs.get("targets")
        inputs = inputs | {"padding_label": self.padding}
        if masked is not None and logits.dim() == 2:
            chosen = None if targets is None else targets[masked.expand_as(targets)].unsqueeze(0)
            return logits.unsqueeze(0), inputs | {"targets": chosen, "token_mask": None}
        if targets is not None and targets.shape == logits.shape[:-1]:
            inputs["token_mask"] = targets.ne(self.padding)
        return logits, inputs


def _tokens(logits: Any) -> bool:
    return isinstance(logits, Tensor) and logits.dim() == 3


def adaptive_log_probabilities(softmax: nn.Module, features: Tensor) -> Tensor:
    """log P over the whole vocabulary, (B, T, V), of an adaptive softmax's features (B, T, C).

    The same numbers as fairseq's `get_log_prob`, whose in-place sums cannot be differentiated.
    """
    rows = features.reshape(-1, features.size(-1))
    head = torch.log_softmax(softmax.head(rows).float(), -1)
    first = softmax.cutoff[0]
    clusters = [head[:, :first]]
    for i, tail in enumerate(softmax.tail):
        clusters.append(torch.log_softmax(tail(rows).float(), -1) + head[:, first + i : first + i + 1])
    return torch.cat(clusters, -1).view(*features.shape[:-1], -1)
