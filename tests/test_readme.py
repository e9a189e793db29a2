"""The README says what is there: its flags exist, all of them, and its snippets run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from attn_reg_plugin import AttentionSite, regularized_attention
from attn_reg_plugin.regularizers import REGISTRY, Regularizer, options_of

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHARED = {option.name for option in options_of(Regularizer)}


@pytest.mark.parametrize("method", ["ad_drop", "attention_layer_drop", "scheduled_dropout"])
def test_every_flag_is_in_the_readme(method):
    for option in options_of(REGISTRY[method]):
        name = f"attn_{option.name}" if option.name in SHARED else f"{method}_{option.name}"
        assert f"`--{name.replace('_', '-')}`" in README


def test_defaults_in_the_readme_are_the_defaults():
    stated = dict(re.findall(r"\| `--ad-drop-([a-z-]+)` \| `?([^`|]+?)`? \|", README))
    assert len(stated) == len(options_of(REGISTRY["ad_drop"])) - len(SHARED)
    for option in options_of(REGISTRY["ad_drop"]):
        if option.name not in SHARED:
            assert stated[option.name.replace("_", "-")] == str(option.default).lower()


def test_help_shows_every_flag_of_the_task():
    folder = Path(__file__).parents[1] / "attn_reg_plugin"
    command = [sys.executable, "-m", "fairseq_cli.train", "--help", "--user-dir", str(folder)]
    finished = subprocess.run([*command, "--task", "attn_reg_translation"], capture_output=True, text=True)
    assert finished.returncode == 0
    for option in options_of(REGISTRY["ad_drop"]):
        if option.name not in SHARED:
            flag = f"--ad-drop-{option.name.replace('_', '-')} "
            assert flag in finished.stdout and option.metadata["help"][:20] in " ".join(finished.stdout.split())


class Tiny(nn.Module):
    """A classifier that holds a site."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.classify = nn.Linear(4, 8), nn.Linear(8, 3)
        self.site = AttentionSite("encoder", "self", 0)

    def forward(self, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(B, T, 4) to (B, 3)."""
        heads = self.project(states).unflatten(-1, (2, 4)).transpose(1, 2)
        return self.classify(regularized_attention(heads, heads, heads, site=self.site).mean(2).flatten(1))


def test_the_loop_trains():
    snippet = next(code for code in SNIPPETS if "regularizer.attach(model)" in code)
    torch.manual_seed(0)
    model = Tiny()
    batches = [{"states": torch.randn(5, 6, 4), "labels": torch.randint(3, (5,))} for _ in range(2)]
    before = [parameter.clone() for parameter in model.parameters()]
    world = {
        "model": model,
        "batches": batches,
        "epochs": 2,
        "optimizer": torch.optim.Adam(model.parameters()),
        "loss_function": lambda outputs, batch: nn.functional.cross_entropy(outputs, batch["labels"]),
    }
    exec(snippet, world)
    sums = world["regularizer"].statistics.take()
    assert (sums["forwards"], sums["regularized"]) == (4, 2)
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert not model._forward_pre_hooks


def test_the_attention_of_ones_own_attends():
    snippet = next(code for code in SNIPPETS if "class MyAttention" in code)
    world = {"nn": nn}
    exec(snippet, world)
    query, valid = torch.randn(2, 3, 4, 5), torch.ones(2, 1, 1, 4, dtype=torch.bool)
    attention = world["MyAttention"](0).eval()
    expected = nn.functional.scaled_dot_product_attention(query, query, query, valid)
    assert torch.equal(attention(query, query, query, valid), expected)
