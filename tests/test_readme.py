"""The README says what is there: its flags exist, all of them, and its snippets run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from attn_reg_plugin import ADDrop, AttentionSite, regularized_attention
from attn_reg_plugin.attention import sites as sites_module
from attn_reg_plugin.bench.rows import ROWS
from attn_reg_plugin.experiments.methods import METHODS
from attn_reg_plugin.regularizers import REGISTRY, Regularizer, options_of

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHARED = {option.name for option in options_of(Regularizer)}


@pytest.mark.parametrize("method", ["ad_drop", "attend_out", "attention_layer_drop", "scheduled_dropout"])
def test_every_flag_is_in_the_readme(method):
    for option in options_of(REGISTRY[method]):
        name = f"attn_{option.name}" if option.name in SHARED else f"{method}_{option.name}"
        assert f"`--{name.replace('_', '-')}`" in README


@pytest.mark.parametrize("method", ["ad_drop", "attend_out"])
def test_defaults_in_the_readme_are_the_defaults(method):
    stated = dict(re.findall(rf"\| `--{method.replace('_', '-')}-([a-z-]+)` \| `?([^`|]+?)`? \|", README))
    assert len(stated) == len(options_of(REGISTRY[method])) - len(SHARED)
    for option in options_of(REGISTRY[method]):
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


def test_the_demos_table_has_a_row_for_each_of_its_methods():
    script = (Path(__file__).parents[1] / "scripts" / "demo.sh").read_text(encoding="utf-8")
    titles = [METHODS[name][0] for name in re.search(r"--methods (\S+)", script)[1].split(",")]
    table = README[README.index("| method | BLEU") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == len(titles)
    for row, title in zip(table, titles, strict=True):
        assert row.startswith(f"| {title}")


def test_the_rows_that_the_readme_measures_are_there():
    named = [
        name for names in re.findall(r"attn-reg bench[^`]*--methods ([\w,]+)", README) for name in names.split(",")
    ]
    assert named and set(named) <= {row.name for row in ROWS}


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


def test_the_trainer_trains(tmp_path, one_thread):
    from transformers import TrainingArguments

    from tests.backends.huggingface_models import batch, build

    examples = [dict(zip(batch("bert"), row, strict=True)) for row in zip(*batch("bert").values(), strict=True)]
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    world = {
        "model": build("bert"),
        "train_dataset": examples,
        "arguments": TrainingArguments(str(tmp_path), num_train_epochs=2, **quiet),
    }
    exec(next(code for code in SNIPPETS if "AttnRegCallback" in code), world)
    logged = [entry["regularized"] for entry in world["trainer"].state.log_history if "loss" in entry]
    assert logged == [0, 1]


class TheirAttention(nn.Module):
    """Attention in a class that cannot be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 2, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(B, T, 8) to the same."""
        query, key, value = (h.unflatten(-1, (2, -1)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        weights = (query @ key.transpose(-1, -2) / 2).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Theirs(nn.Module):
    """Two of them, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.classify = nn.ModuleList([TheirAttention(), TheirAttention()]), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(B, T, 8) to (B, 3)."""
        for layer in self.layers:
            x = x + layer(x, mask)
        return self.classify(x.mean(1))


def test_a_class_that_cannot_be_changed_is_reached(monkeypatch):
    snippet = next(code for code in SNIPPETS if "class TheirBackend" in code)
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 20
    monkeypatch.setattr(sites_module, "_BACKENDS", dict(sites_module._BACKENDS))
    monkeypatch.setitem(sys.modules, "their_package", sys.modules[__name__])
    exec(snippet, {"TheirAttention": TheirAttention})
    torch.manual_seed(0)
    model, x, mask = Theirs(), torch.randn(2, 5, 8), torch.tensor([True, True, True, True, False])
    plain, before = model(x, mask), [list(vars(layer)) for layer in model.layers]
    regularizer = ADDrop(p=0.5, q=1.0, cross_tuning="off")
    with regularizer.attach(model):
        assert [site.name for site in regularizer.attached_sites] == ["encoder.self[0]", "encoder.self[1]"]
        assert not torch.allclose(model(x, mask), plain)
        assert all(site.keep.shape == (2, 2, 5, 5) and not site.keep.all() for site in regularizer.attached_sites)
        with pytest.raises(ValueError, match="regularized already"):
            ADDrop().attach(model)
        assert torch.equal(model.eval()(x, mask), plain)
    assert [list(vars(layer)) for layer in model.layers] == before


def test_another_task_is_made_a_regularized_one():
    from fairseq.tasks import TASK_REGISTRY
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    snippet = next(code for code in SNIPPETS if "class MyRegularizedTask" in code)
    world = {"MyConfig": TranslationConfig, "MyTask": TranslationTask, "__name__": __name__}
    exec(snippet, world)
    assert TASK_REGISTRY.pop("my_regularized_task") is world["MyRegularizedTask"]


def test_every_snippet_is_run_here():
    known = ("regularizer.attach(model)", "AttnRegCallback", "MyAttention", "TheirBackend", "MyRegularizedTask")
    for snippet in SNIPPETS:
        assert any(name in snippet for name in known), snippet
