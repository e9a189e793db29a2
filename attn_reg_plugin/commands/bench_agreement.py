"""`attn-reg bench agreement`: what AD-DROP's kept and fresh candidates have in common, over a training."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from attn_reg_plugin import configuration
from attn_reg_plugin.bench.agreement import MEASURES, NOTES, mean_share
from attn_reg_plugin.bench.agreement_plot import plot_agreement
from attn_reg_plugin.configuration import setting
from attn_reg_plugin.experiments.fine_tuning import PACKAGED, FineTuning
from attn_reg_plugin.experiments.methods import known_methods, select_methods
from attn_reg_plugin.experiments.report.table import markdown, terminal_table
from attn_reg_plugin.experiments.translation import TranslationComparison
from attn_reg_plugin.files import write_json, write_text
from attn_reg_plugin.labelled import TASKS
from attn_reg_plugin.pictures import load_matplotlib
from attn_reg_plugin.terminal import show

TRANSLATION = "translation"


@dataclass(frozen=True, kw_only=True)
class AgreementSettings:
    """The settings of `attn-reg bench agreement`."""

    task: str = setting(f"{TRANSLATION}, or one of {', '.join(TASKS)}", metavar="TASK", positional=True)
    data: str = setting(
        "folder of the official files; for translation one made by `attn-reg prepare`", metavar="DATA", positional=True
    )
    model: str | None = setting(f"folder or hub name of the encoder (default: the package {PACKAGED})", None)
    epochs: int = setting("of plain training", 5, within="[1, inf)")
    lr: float = setting("peak learning rate of Adam", 5e-5, within="(0, inf)")
    batch_size: int = setting("examples in an update", 16, within="[1, inf)")
    max_length: int = setting("tokens of an input; of labelled tasks", 256, within="[1, inf)")
    examples: int = setting(
        "of labelled tasks: train on N only, drawn at random; 0: on all", 0, within="[0, inf)", metavar="N"
    )
    probed: int = setting("training examples to probe at the end of each epoch", 128, within="[1, inf)", metavar="N")
    p: float = setting("ratio of candidates in each row", 0.3, within="(0, 1)")
    sites: str = setting("which attention, e.g. 'encoder.self[0,2-5] decoder.cross', '*'", "*")
    seed: int = setting("of the training", 1, within="[0, inf)")
    out: Path | None = setting(
        "write agreement.json, agreement.md and agreement.png into FOLDER", None, metavar="FOLDER"
    )
    train_flags: str = setting("more flags of fairseq-train, in one text; or behind --", "", rest=True)

    def command(self, folder: str) -> list[str]:
        """The training, as `attn-reg finetune` and `attn-reg compare` would run it.

        Args:
            folder: for what it writes.

        Raises:
            ValueError: bad input.
            FileNotFoundError: data that is missing.
        """
        same: dict[str, Any] = {"epochs": self.epochs, "lr": self.lr, "batch_size": self.batch_size, "cpu": True}
        same |= {"out": Path(folder), "methods": "plain", "seeds": (self.seed,), "train_flags": self.train_flags}
        if self.task != TRANSLATION:
            own = {"model": self.model, "max_length": self.max_length, "train_examples": self.examples}
            comparison: Any = FineTuning(task=self.task, data=self.data, **own, **same)
        else:
            for name in ("model", "examples"):
                if getattr(self, name):
                    raise ValueError(f"--{name} is {getattr(self, name)}, but it is for labelled tasks only")
            same["generate_flags"] = "--post-process none"  # nothing is translated, whatever the pieces are
            comparison = TranslationComparison(data=Path(self.data), **SMALL, **same)
        return comparison.plan(select_methods("plain", (), known_methods()))[0].train_command()


#: the Transformer of the demo, which `-- FLAGS` of fairseq-train change
SMALL: dict[str, Any] = {
    "layers": 2,
    "embed_dim": 128,
    "ffn_dim": 256,
    "heads": 4,
    "dropout": 0.1,
    "label_smoothing": 0.0,
    "warmup": 200,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments; whatever follows `--` goes to the training."""
    parser.usage = "attn-reg bench agreement TASK DATA [options] [-- flags of fairseq-train]"
    configuration.add_arguments(parser, AgreementSettings)


def run(arguments: argparse.Namespace) -> int:
    """Train, compare, print the table; 0.

    Raises:
        ValueError: bad input.
    """
    from attn_reg_plugin.bench.agreement_training import epochs_of, quiet

    settings = configuration.from_arguments(AgreementSettings, arguments, "agreement")
    if settings.out is not None:
        load_matplotlib("--out")
        settings.out.mkdir(parents=True, exist_ok=True)
    described = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    result: dict[str, Any] = {"settings": described, "epochs": []}
    with quiet(), tempfile.TemporaryDirectory() as folder:
        command = settings.command(folder)
        for epoch in epochs_of(command, settings.p, settings.sites, settings.probed, settings.batch_size):
            result["epochs"].append(epoch)
            Console(stderr=True).print(f"epoch {epoch['epoch']} of {settings.epochs}: loss {epoch['loss']:.3f}")
            if settings.out is not None:
                _write(result, settings.out)
    show(Console(), terminal_table(*cells(result["epochs"])), [what_of(result), *NOTES])
    return 0


def _write(result: Mapping[str, Any], out: Path) -> None:
    """The files, as far as the training has come."""
    write_json(out / "agreement.json", result)
    write_text(out / "agreement.md", markdown(*cells(result["epochs"]), [what_of(result), *NOTES]))
    plot_agreement({what_of(result): result["epochs"]}, out / "agreement.png")


def what_of(result: Mapping[str, Any]) -> str:
    """What was trained, in a few words."""
    settings, last = result["settings"], result["epochs"][-1]
    return f"{settings['task']}, learning rate {settings['lr']:g}, {last['updates'] // last['epoch']} updates an epoch"


def cells(epochs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The table: a row for each epoch and site, and one for all sites of an epoch, each weighted by its rows."""
    header = ["epoch", "loss", "lr", "site", "rows", "chance", *(one.title for one in MEASURES.values())]
    body = []
    for epoch in epochs:
        first = [str(epoch["epoch"]), f"{epoch['loss']:.3f}", f"{epoch['lr']:.1e}"]
        names = ("chance", *MEASURES)
        for site, rows in epoch["rows"].items():
            shares = [epoch.get(name, {}).get(site) for name in names]
            body.append([*first, site, str(rows), *map(_percent, shares)])
        shares = [mean_share(epoch, name) for name in names]
        body.append([*first, "all", str(sum(epoch["rows"].values())), *map(_percent, shares)])
    return header, body


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"
