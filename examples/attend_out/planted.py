"""A planted problem: does AttendOut's generator find the position that a model should not lean on?

Sequences of six words. The label follows from the word at position 1, one of 200 that have to be learnt one by one;
the word at position 3 gives the label away in training and says nothing in validation. The model is a decoder of one
step with one attention over the sequence: the one row of that attention is all it sees, so a dropped position is gone.

    python examples/attend_out/planted.py --seeds 1 2 3 4 5 --out examples/attend_out/curves

trains with the paper's estimator (`paper`), with the less noisy one (`round`) and with the latter on shuffled rewards,
and writes the curves as JSON and as a plot: the generator's drop rate of position 3 minus the mean of the others'.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_reg_plugin import AttendOut, AttentionSite, regularized_attention
from attn_reg_plugin.regularizers import Outcome, Tokens
from attn_reg_plugin.regularizers.attend_out.game import Game

LENGTH, TRUE, SPURIOUS, WORDS = 6, 1, 3, 200
HINTS, START = WORDS, WORDS + 2  # two words that give the label away, and the decoder's first token

#: options of AttendOut by the name of a curve: the paper's estimator, the less noisy one, and the control
#: (a round of one update needs an eighth of the default's room for its gradient, which is the sum over the updates)
LESS_NOISY = {
    "steps": 1,
    "credit": "round",
    "reward_examples": 256,
    "normalize": True,
    "winner": "best",
    "generator_clip_norm": 1.0,
}
#: (the paper's makes an eighth of the generator's updates, hence its learning rate)
ESTIMATORS: dict[str, dict[str, Any]] = {
    "round": {"generator_lr": 1e-4, **LESS_NOISY},
    "shuffled": {"generator_lr": 1e-4, **LESS_NOISY},
    "paper": {"generator_lr": 8e-4},
}
LEARNING_RATE, BATCH = 3e-4, 16  # of the two players


class Labeller(nn.Module):
    """Embeddings, and one attention from a start token over the sequence; two classes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS + 3, width), nn.Embedding(LENGTH, width)
        nn.init.normal_(self.positions.weight, std=0.5)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.site = AttentionSite("decoder", "cross", 0)
        self.classify = nn.Linear(width, 2)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """(B, 6) ids to (B, 2) logits; labels are for the problem, not for the model."""
        states, start = self.tokens(ids) + self.positions.weight, self.tokens(first_tokens(ids))
        query, key, value = self.query(start), self.key(states), self.value(states)
        read = regularized_attention(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), site=self.site)
        return self.classify(read[:, 0, 0])


def first_tokens(ids: Tensor) -> Tensor:
    """The decoder's input, (B, 1)."""
    return ids.new_full((ids.size(0), 1), START)


def draw(n: int, spurious: bool, generator: torch.Generator) -> dict[str, Tensor]:
    """n examples: ids (n, 6) and labels (n,); `spurious` makes position 3 give the label away."""
    ids = torch.randint(WORDS, (n, LENGTH), generator=generator)
    labels = ids[:, TRUE] % 2
    hint = labels if spurious else torch.randint(2, (n,), generator=generator)
    ids[:, SPURIOUS] = HINTS + hint
    return {"ids": ids, "labels": labels}


class Planted:
    """The problem as AttendOut sees it; its validation data is free of the hint."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Outcome:
        """Cross-entropy, its mean in training; and whether the label is right."""
        logits, labels = model(**inputs), inputs["labels"]
        losses = F.cross_entropy(logits, labels, reduction="none")
        return Outcome(losses.mean() if model.training else losses, (logits.argmax(-1) == labels).float())

    def tokens(self, inputs: dict[str, Tensor]) -> dict[str, Tokens]:
        """The sequence, and the decoder's one token; nothing is padding."""
        stacks = {"encoder": inputs["ids"], "decoder": first_tokens(inputs["ids"])}
        return {stack: Tokens(ids, torch.ones_like(ids, dtype=torch.bool)) for stack, ids in stacks.items()}

    def validation(self, n: int) -> list[dict[str, Tensor]]:
        """n fresh examples, as one batch."""
        return [draw(n, False, self.generator)]


class ShuffledGame(Game):
    """A game in which masks are paired with the rewards of some earlier round."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return the advantages of one of the last 20 rounds, drawn at random."""
        self.past = [*getattr(self, "past", [torch.zeros_like(rewards)])[-20:], rewards]
        return super().advantages(self.past[int(torch.randint(len(self.past) - 1, ()))])


class Shuffled(AttendOut):
    """The control: rewards say nothing about the masks."""

    game_class = ShuffledGame


def drop_rates(regularizer: AttendOut) -> Tensor:
    """The generator's mean P(drop) of each position, (6,), on training sequences."""
    inputs = draw(256, True, torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = regularizer.game.generator(regularizer.problem.tokens(inputs))["decoder.cross[0]"]
    return torch.sigmoid(-logits / regularizer.temperature).mean((0, 1))


def play(name: str, seed: int, updates: int, points: int = 40) -> list[list[Any]]:
    """Train once with the estimator of that name; what the generator has learnt at `points` moments of it.

    Each is [update, drop rate of position 3 minus the mean of the others', the six drop rates].
    """
    torch.manual_seed(seed)
    model, data, curve = Labeller(), torch.Generator().manual_seed(seed), []
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    method = Shuffled if name == "shuffled" else AttendOut
    regularizer = method(problem=Planted(data), optimizer=optimizer, sites="decoder.cross", **ESTIMATORS[name])
    with regularizer.attach(model):
        for update in range(1, updates + 1):
            regularizer.problem.loss(model, draw(BATCH, True, data)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            regularizer.end_update()
            if update % max(1, updates // points) == 0:
                rates = drop_rates(regularizer)
                gap = rates[SPURIOUS] - (rates.sum() - rates[SPURIOUS]) / (LENGTH - 1)
                curve.append([update, round(float(gap), 4), [round(rate, 4) for rate in rates.tolist()]])
    return curve


def plot(curves: dict[str, dict[int, list]], path: Path) -> None:
    """One thin line a seed, their mean in bold, and the 0.2 that the generator has to pass."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for number, (name, seeds) in enumerate(curves.items()):
        gaps = torch.tensor([[point[1] for point in curve] for curve in seeds.values()])
        updates = [point[0] for point in next(iter(seeds.values()))]
        for gap in gaps:
            axes.plot(updates, gap, color=f"C{number}", linewidth=0.7, alpha=0.5)
        axes.plot(updates, gaps.mean(0), color=f"C{number}", linewidth=2.5, label=name)
    axes.axhline(0.2, color="grey", linestyle=":")
    axes.set(xlabel="update", ylabel="drop rate of position 3 minus the others'")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Every estimator with every seed."""
    flags = argparse.ArgumentParser(description="A planted problem for AttendOut's generator.")
    flags.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS))
    flags.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    flags.add_argument("--updates", type=int, default=2000)
    flags.add_argument("--out", type=Path, help="writes OUT.json and OUT.png")
    args, curves = flags.parse_args(), {}
    torch.set_num_threads(1)
    for name in args.estimators:
        curves[name] = {}
        for seed in args.seeds:
            start = time.process_time()
            curves[name][seed] = play(name, seed, args.updates)
            _, gap, rates = curves[name][seed][-1]
            shown, spent = " ".join(f"{rate:.2f}" for rate in rates), time.process_time() - start
            print(f"{name:8} seed {seed}: gap {gap:+.2f}, drop rates {shown}, {spent:.0f} s", flush=True)
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(curves) + "\n")
        plot(curves, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
