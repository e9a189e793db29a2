"""The README says what is there: its snippets and the guide's run, and its tables are of what exists."""

import argparse
import re
import sys

import torch
from torch import nn

from attn_reg_plugin import ADDrop, AttentionSite, regularized_attention
from attn_reg_plugin.bench.rows import all_rows
from attn_reg_plugin.configuration import load
from attn_reg_plugin.experiments.methods import select_methods
from attn_reg_plugin.regularizers import REGISTRY, Regularizer, options_of
from tests.loading import ROOT
from tests.regularizers.registered import methods_of_readme

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README + GUIDE, re.DOTALL)
SHARED = {option.name for option in options_of(Regularizer)}


def test_help_shows_every_flag_of_the_task(monkeypatch, capsys):
    from attn_reg_plugin.tasks.attn_reg_task import print_flags_if_asked
    from attn_reg_plugin.tasks.attn_reg_translation import AttnRegTranslationConfig

    monkeypatch.setattr(sys, "argv", ["fairseq-train", "--help", "--task", "attn_reg_translation"])
    print_flags_if_asked("attn_reg_translation", AttnRegTranslationConfig)
    printed = capsys.readouterr().out
    for option in options_of(REGISTRY["ad_drop"]):
        if option.name not in SHARED:
            flag = f"--ad-drop-{option.name.replace('_', '-')} "
            assert flag in printed and option.metadata["help"][:20] in " ".join(printed.split())


def test_it_is_short_and_begins_with_the_three_uses():
    lines = README.splitlines()
    assert len(lines) <= 140
    uses = [next(i for i, line in enumerate(lines) if word in line) for word in ("--attn-reg", "Callback", "attach(")]
    assert uses == sorted(uses) and uses[-1] < 90, "two screens"


def test_its_methods_are_registered_ones():
    """The list of all is the documentation's, from the registry."""
    methods = methods_of_readme()
    assert len(set(methods)) == len(methods) > 1 and set(methods) <= set(REGISTRY)


def test_the_demos_table_has_a_row_for_each_of_its_methods():
    demo = load(ROOT / "examples" / "demo" / "demo.yaml")
    titles = [method.title for method in select_methods(demo.compare.methods)]
    page = (ROOT / "examples" / "demo" / "README.md").read_text(encoding="utf-8")
    table = page[page.index("| method | BLEU | BLEU − plain") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == len(titles)
    for row, title in zip(table, titles, strict=True):
        assert row.startswith(f"| {title}")


def test_the_rows_that_the_costs_name_are_there():
    costs = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    named = [
        name for names in re.findall(r"attn-reg bench[^`]*--methods\s+([\w,]+)", costs) for name in names.split(",")
    ]
    assert named and set(named) <= {row.name for row in all_rows()}


class Tiny(nn.Module):
    """A classifier that holds a site."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.classify = nn.Linear(4, 8), nn.Linear(8, 3)
        self.site = AttentionSite("encoder", "self", 0)

    def forward(self, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
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


def test_a_resumed_loop_goes_on_with_its_epochs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippet, regularized = next(code for code in SNIPPETS if "train(epoch)" in code), []
    for epochs in (1, 3):
        model, regularizer = Tiny(), ADDrop(p=0.3, q=0.3)

        def train(epoch, model=model, regularizer=regularizer):
            regularizer.begin_epoch(epoch)
            model(torch.randn(5, 6, 4), None).logsumexp(-1).sum().backward()
            regularized.append(regularizer.statistics.take()["regularized"])
            regularizer.end_update()

        exec(snippet, {"model": model, "regularizer": regularizer, "epochs": epochs, "train": train})
    assert regularized == [0, 1, 0] and regularizer.updates == 3


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
    logged = [entry.get("attn_reg/regularized") for entry in world["trainer"].state.log_history if "loss" in entry]
    assert logged == [None, 1], "a plain epoch, of which nothing is logged, and one that is regularized"


def test_another_task_is_made_a_regularized_one():
    """With a config dataclass, and without one."""
    from fairseq.tasks import TASK_CLASS_NAMES, TASK_REGISTRY
    from fairseq.tasks.speech_to_text import SpeechToTextTask
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    world = {"MyConfig": TranslationConfig, "MyTask": TranslationTask, "__name__": __name__}
    world["SpeechToTextTask"] = SpeechToTextTask
    for snippet in [code for code in SNIPPETS if "class MyRegularizedTask" in code]:
        exec(snippet, world)
        made = TASK_REGISTRY.pop("my_regularized_task")
        TASK_CLASS_NAMES.remove("MyRegularizedTask")
        assert made is world["MyRegularizedTask"]
    parser = argparse.ArgumentParser()
    made.add_args(parser)
    assert {"--attn-reg", "--ad-drop-p", "--config-yaml"} <= parser._option_string_actions.keys()


def test_every_snippet_is_run_here():
    known = ("regularizer.attach(model)", "AttnRegCallback", "MyAttention", "(AttnRegTask, MyTask)", "train(epoch)")
    known += ("(AttnRegTask, SpeechToTextTask)", "LightningCallback", "Accelerator(")
    assert len(SNIPPETS) == len(known), "each stands once"
    for snippet in SNIPPETS:
        assert any(name in snippet for name in known), snippet
