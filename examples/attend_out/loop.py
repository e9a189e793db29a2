"""AttendOut in a loop of your own: in which language of the phrasebook is this, told by its letters?

A `Problem` tells AttendOut how to compute the loss, where the tokens are and how to draw validation examples.
"""

import torch
import torch.nn.functional as F
from torch import nn

from attn_reg_plugin import AttendOut, AttentionSite, regularized_attention
from attn_reg_plugin.corpora.phrasebook import splits
from attn_reg_plugin.regularizers import Outcome, Tokens

PAD, LETTERS, SIZE, HEADS, LENGTH, STEPS = 0, 0x250, 32, 2, 48, 8  # Latin letters have numbers below 0x250


class Classifier(nn.Module):
    """Letters (B, T), one layer of self-attention, the mean state, languages (B, 3)."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(LETTERS, SIZE, PAD), nn.LayerNorm(SIZE)
        self.site = AttentionSite("encoder", "self", 0)
        self.project, self.output = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, 3)

    def forward(self, tokens):
        x, valid = self.embedding(tokens), tokens.ne(PAD)
        query, key, value = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        attended = regularized_attention(query, key, value, valid=valid[:, None, None, :], site=self.site)
        x = self.norm(x + attended.transpose(1, 2).flatten(2)) * valid.unsqueeze(-1)
        return self.output(x.sum(1) / valid.sum(1, keepdim=True))


class Languages:
    """The problem. Its `inputs` are the arguments of the model's forward by name, and what the loop supplies."""

    def __init__(self, tokens, labels):
        self.examples = {"tokens": tokens, "targets": labels}  # of validation

    def loss(self, model, inputs):
        """In training the loop's own loss, for the defender; in evaluation a loss, and a metric, an example."""
        logits, labels = model(inputs["tokens"]), inputs["targets"]
        losses = F.cross_entropy(logits, labels, reduction="mean" if model.training else "none")
        return Outcome(losses, metric=(logits.argmax(-1) == labels).float())

    def tokens(self, inputs):
        """Return what the generator reads, for each stack: ids, and which of them are real."""
        return {"encoder": Tokens(inputs["tokens"], inputs["tokens"].ne(PAD))}

    def validation(self, n):
        """n examples drawn at random, here as one batch."""
        chosen = torch.randperm(len(self.examples["targets"]))[:n]
        yield {name: values[chosen] for name, values in self.examples.items()}


def main(updates=80):
    """Train; the share of validation sentences that are told right, and the game."""
    torch.manual_seed(1)
    corpus = splits(train=400, valid=60, test=1)
    rows = {split: [text[:LENGTH].ljust(LENGTH, chr(PAD)) for row in corpus[split] for text in row] for split in corpus}
    tokens, valid = (torch.tensor([[ord(c) for c in text] for text in rows[split]]) for split in ("train", "valid"))
    labels, truth = torch.arange(len(tokens)) % 3, torch.arange(len(valid)) % 3  # English, Romanian, Turkish
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    regularizer = AttendOut(steps=STEPS, problem=Languages(valid, truth), optimizer=optimizer)
    with regularizer.attach(model):
        for batch in torch.randint(len(tokens), (updates, 32)):
            regularizer.supply(targets=labels[batch])  # which the problem needs; the forward's arguments lack them
            F.cross_entropy(model(tokens[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            regularizer.end_update()  # the defender's step and, after STEPS updates, the end of the round
            game = regularizer.game
            if game.in_round == 0:
                print(f"round {game.rounds}:", {key: round(value, 4) for key, value in game.last_round.items()})
    return (model.eval()(valid).argmax(-1) == truth).float().mean().item(), regularizer


if __name__ == "__main__":
    print(f"{main()[0]:.1%} of the validation sentences are told right")
