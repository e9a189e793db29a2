"""A translator of a user's own, letter by letter, with its own attention and training loop, and any regularizer.

What the regularizers need of it is marked (1) to (4).
"""

import torch
import torch.nn.functional as F
from torch import nn

from attn_reg_plugin import AttentionSite, regularized_attention
from attn_reg_plugin.corpora.phrasebook import splits
from attn_reg_plugin.regularizers import Outcome, Tokens, build

PAD, START, END, LETTERS = 0, 1, 2, 0x250  # Latin letters have numbers below 0x250
METHODS = {
    "none": {},
    "ad_drop": {"p": 0.3, "q": 0.3},
    "attend_out": {"steps": 4, "initial_keep": 0.9},
    "attention_layer_drop": {"p": 0.1},
    "scheduled_dropout": {"schedule": "drop *: 0:0.3 100:0.05"},
}


class Attention(nn.Module):
    """Multi-head attention (B, T, C) over memory (B, S, C); `valid` is bool, True = attend."""

    def __init__(self, width, heads, site):
        super().__init__()
        self.heads, self.site = heads, site  # (1) it holds a site ...
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, states, memory, valid):
        q, k, v = self.query(states), self.key(memory), self.value(memory)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        attended = regularized_attention(q, k, v, valid=valid, site=self.site)  # (2) ... and lets it attend
        return self.output(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, in a decoder also over the encoder's states, and a feed-forward."""

    def __init__(self, stack, number, width, heads):
        super().__init__()
        kinds = ["self"] if stack == "encoder" else ["self", "cross"]
        self.attentions = nn.ModuleList(Attention(width, heads, AttentionSite(stack, kind, number)) for kind in kinds)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(len(kinds) + 1))
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x, valid, memory=None, memory_valid=None):
        x = x + self.attentions[0](self.norms[0](x), self.norms[0](x), valid)
        if memory is not None:
            x = x + self.attentions[1](self.norms[1](x), memory, memory_valid)
        return x + self.feed(self.norms[-1](x))


class Translator(nn.Module):
    """Source (B, S) and target prefix (B, T) to logits (B, T, V)."""

    def __init__(self, width=64, heads=4, layers=2, length=160):
        super().__init__()
        self.letters, self.positions = nn.Embedding(LETTERS, width, PAD), nn.Embedding(length, width)
        made = {stack: [Layer(stack, i, width, heads) for i in range(layers)] for stack in ("encoder", "decoder")}
        self.stacks = nn.ModuleDict({stack: nn.ModuleList(ones) for stack, ones in made.items()})
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.letters.weight, std=width**-0.5)  # also the output's

    def embed(self, tokens):
        return self.letters(tokens) + self.positions.weight[: tokens.size(1)]

    def forward(self, source, prefix):
        memory, real = self.embed(source), source.ne(PAD)[:, None, None]
        for layer in self.stacks["encoder"]:
            memory = layer(memory, real)
        x, past = self.embed(prefix), torch.ones(prefix.size(1), prefix.size(1), dtype=torch.bool).tril()
        for layer in self.stacks["decoder"]:
            x = layer(x, past & prefix.ne(PAD)[:, None, None], memory, real)
        return F.linear(self.norm(x), self.letters.weight)


def letters(texts, first=()):
    """Texts as a padded tensor of letters, (B, T)."""
    rows = [torch.tensor([*first, *(min(ord(c), LETTERS - 1) for c in text), END]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def loss_of(model, batch, reduction="mean"):
    """Cross-entropy of the target's letters; with `none` each example's mean."""
    prefix, labels = batch["target"][:, :-1], batch["target"][:, 1:]
    losses = F.cross_entropy(model(batch["source"], prefix).transpose(1, 2), labels, reduction="none", ignore_index=PAD)
    known = labels.ne(PAD)
    return losses.sum() / known.sum() if reduction == "mean" else losses.sum(1) / known.sum(1)


class Problem:
    """(4) What AttendOut alone has to know; `inputs` are the forward's arguments and what the loop supplied."""

    def __init__(self, valid):
        self.valid = valid

    def loss(self, model, inputs):
        return Outcome(loss_of(model, inputs["batch"], "mean" if model.training else "none"))

    def tokens(self, inputs):
        ids = {"encoder": inputs["batch"]["source"], "decoder": inputs["batch"]["target"][:, :-1]}
        return {stack: Tokens(tokens, tokens.ne(PAD)) for stack, tokens in ids.items()}

    def validation(self, n):
        chosen = torch.randperm(len(self.valid["source"]))[:n]
        yield {"batch": {side: tokens[chosen] for side, tokens in self.valid.items()}}


def train(method, epochs=2, sentences=2000, width=64, batch_size=32, seed=1):
    """Train with a method, or `none`; the validation loss before and after."""
    torch.manual_seed(seed)
    corpus = splits(sentences, 100, 1)
    texts = {split: ([row.en for row in rows], [row.ro for row in rows]) for split, rows in corpus.items()}
    data = {s: {"source": letters(en), "target": letters(ro, [START])} for s, (en, ro) in texts.items()}
    model = Translator(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    regularizer = None if method == "none" else build(method, sites="*", **METHODS[method])
    if method == "attend_out":
        regularizer.problem, regularizer.optimizer = Problem(data["valid"]), optimizer
    if regularizer:
        regularizer.attach(model)  # (3) attached, told of epochs and updates, detached
    losses = [validate(model, data["valid"])]
    for epoch in range(1, epochs + 1):
        if regularizer:
            regularizer.begin_epoch(epoch)
        for chosen in torch.randperm(sentences).split(batch_size):
            batch = {side: tokens[chosen] for side, tokens in data["train"].items()}
            if regularizer:
                regularizer.supply(batch=batch, token_mask=batch["target"][:, 1:].ne(PAD))
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if regularizer:
                regularizer.end_update()
        losses.append(validate(model, data["valid"]))
    if regularizer:
        regularizer.detach()
    return losses


@torch.no_grad()
def validate(model, batch):
    """The mean loss of a letter."""
    loss = loss_of(model.eval(), batch).item()
    model.train()
    return loss
