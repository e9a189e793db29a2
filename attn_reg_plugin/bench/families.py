"""The models that `attn-reg bench` trains, a function per family; to add a family, add a row to `FAMILIES`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from attn_reg_plugin.bench.naive_ad_drop import naive_forward
from attn_reg_plugin.bench.settings import Settings
from attn_reg_plugin.callbacks import example_outcomes
from attn_reg_plugin.regularizers import Outcome, Tokens
from attn_reg_plugin.regularizers.ad_drop.objectives import prediction
from attn_reg_plugin.regularizers.attend_out.defender import Defender
from attn_reg_plugin.regularizers.base.outputs import logits_of

PADDING = 1
#: ids below are special in fairseq's dictionaries: beginning, padding, end, unknown
FIRST_WORD = 4
CLASSES = 2
#: model, inputs, targets and stacks of a `Workload`
Parts = tuple[nn.Module, dict[str, Tensor], Tensor, dict[str, str]]


@dataclass
class Workload:
    """A model with a batch and an optimizer, all that a step needs; to methods the `Training` and its `Problem`.

    Attributes:
        inputs: the forward's arguments by name.
        targets: (B, T), padded with PADDING; of a classifier (B,) labels.
        stacks: the name of the argument with the token ids of each stack.
    """

    model: nn.Module
    inputs: Mapping[str, Tensor]
    targets: Tensor
    stacks: Mapping[str, str]
    clip_norm: ClassVar[float] = 0.0
    copy_of: ClassVar[type[Defender]] = Defender

    def __post_init__(self) -> None:
        """Make the optimizer."""
        self.model.train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.batch = {**self.inputs, "targets": self.targets}

    def objective(self, outputs: Any) -> Tensor:
        """AD-DROP's F of the pseudo labels: their log-likelihood, or the logits of a classifier."""
        return prediction("pseudo", outputs, {"token_mask": self.targets.ne(PADDING)})

    def naive_forward(self, **inputs: Tensor) -> Any:
        """The outputs of the paper's form of AD-DROP."""
        return naive_forward(self.model, inputs, self.objective)

    def loss_of(self, outputs: Any, targets: Tensor) -> Tensor:
        """Cross entropy, of tokens label-smoothed."""
        of_tokens = {"ignore_index": PADDING, "label_smoothing": 0.1} if targets.dim() > 1 else {}
        return F.cross_entropy(logits_of(outputs).float().flatten(0, -2), targets.flatten(), **of_tokens)

    def update(self, loss: Tensor) -> None:
        """Backward, Adam."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def problem(self, subset: str) -> tuple[Workload, int]:
        """See `Training`; examples are drawn again and again, so there are as many as are wanted."""
        return self, sys.maxsize

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Outcome:
        """The loss of an update, or in evaluation of each example; without targets, of the batch."""
        outputs = model(**{name: batch[name] for name in self.inputs})
        targets = batch.get("targets", self.targets)
        if model.training:
            return Outcome(self.loss_of(outputs, targets))
        return example_outcomes(logits_of(outputs), targets, targets.ne(PADDING) if targets.dim() > 1 else None)

    def tokens(self, batch: Mapping[str, Tensor]) -> dict[str, Tokens]:
        """Token ids and padding of each stack."""
        return {stack: Tokens(batch[name], batch[name].ne(PADDING)) for stack, name in self.stacks.items()}

    def validation(self, n: int) -> Iterable[dict[str, Tensor]]:
        """n examples of the batch, drawn at random, as one batch."""
        chosen = torch.randint(self.targets.size(0), (n,), device=self.targets.device)
        yield {name: tensor[chosen] for name, tensor in self.batch.items()}

    def resident_bytes(self) -> int:
        """Parameters, buffers, optimizer state and the batch: what stays between steps of plain training."""
        kept = [self.batch, *self.model.parameters(), *self.model.buffers(), self.optimizer.state_dict()]
        tensors = [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def build_workload(settings: Settings) -> Workload:
    """The model, batch and optimizer of `settings`; always the same."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but PyTorch sees no CUDA device here")
    torch.manual_seed(1)
    model, inputs, targets, stacks = FAMILIES[settings.family](settings)
    inputs, targets = tree_map(lambda tensor: tensor.to(settings.device), (inputs, targets))
    return Workload(model.to(settings.device, getattr(torch, settings.dtype)), inputs, targets, stacks)


def _batch(settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Source (padded on the left, as fairseq does), shifted target and target, each (B, length)."""
    size = (settings.batch, settings.length)
    lengths = torch.linspace(settings.length, settings.length * settings.shortest, settings.batch)
    lengths = lengths.round().clamp(min=1).unsqueeze(-1)
    places = torch.arange(settings.length)
    source, target, shifted = (torch.randint(FIRST_WORD, settings.vocabulary, size) for _ in range(3))
    shifted[:, 0], shifted[:, 1:] = 2, target[:, :-1]
    source.masked_fill_(places < settings.length - lengths, PADDING)
    for padded in (target, shifted):
        padded.masked_fill_(places >= lengths, PADDING)
    return source, shifted, target


def _fairseq(settings: Settings) -> Parts:
    """fairseq's Transformer, which is base unless it is told otherwise."""
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel

    words = Dictionary()
    for word in range(settings.vocabulary - FIRST_WORD):
        words.add_symbol(str(word))
    tiny = {"layers": 2, "embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 2} if settings.size == "tiny" else {}
    shape = {f"{stack}_{name}": value for stack in ("encoder", "decoder") for name, value in tiny.items()}
    options = Namespace(dropout=settings.dropout, share_all_embeddings=True, **shape)
    model = TransformerModel.build_model(options, SimpleNamespace(source_dictionary=words, target_dictionary=words))
    source, shifted, target = _batch(settings)
    inputs = {"src_tokens": source, "src_lengths": source.ne(PADDING).sum(-1), "prev_output_tokens": shifted}
    return model, inputs, target, {"encoder": "src_tokens", "decoder": "prev_output_tokens"}


def _bert(settings: Settings) -> Parts:
    """Hugging Face's BERT with a classification head, base as well; padded on the right, as its tokenizer does."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=settings.vocabulary, pad_token_id=PADDING, num_labels=CLASSES)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = settings.dropout
    config.max_position_embeddings = max(config.max_position_embeddings, settings.length)
    if settings.size == "tiny":
        config.update({"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64})
    model = BertForSequenceClassification(config)
    tokens = _batch(settings)[0].flip(1)
    inputs = {"input_ids": tokens, "attention_mask": tokens.ne(PADDING).long()}
    return model, inputs, torch.randint(CLASSES, (settings.batch,)), {"encoder": "input_ids"}


FAMILIES: dict[str, Callable[[Settings], Parts]] = {"fairseq": _fairseq, "bert": _bert}
