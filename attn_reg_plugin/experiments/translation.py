"""`attn-reg compare`: train, translate and score several methods on the same corpus; a table and learning curves.

Each method and seed is a run of fairseq-train and fairseq-generate in a folder of its own under `out`.
What is done is not done again, and an interrupted training goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from attn_reg_plugin.configuration import refusing, setting
from attn_reg_plugin.corpora.manifest import NAME as MANIFEST
from attn_reg_plugin.experiments.checks import updates_of
from attn_reg_plugin.experiments.comparison import Comparison, recorded, seeds_of
from attn_reg_plugin.experiments.curve_plot import CURVES, plot_validation
from attn_reg_plugin.experiments.data_folder import DataFolder, refuse_split
from attn_reg_plugin.experiments.differences import differences
from attn_reg_plugin.experiments.methods import START, UNTUNED, Method, split_flags
from attn_reg_plugin.experiments.recipe import Recipe
from attn_reg_plugin.experiments.run_settings import values_of
from attn_reg_plugin.experiments.runs_before import Run
from attn_reg_plugin.experiments.table import cells, statistics_notes, summarize
from attn_reg_plugin.experiments.training_part import CHOOSING, DECIDED, TrainingPart, sampling_flags
from attn_reg_plugin.files import read_json
from attn_reg_plugin.labelled import Sampling
from attn_reg_plugin.opus_mt.conversion import CHECKPOINT, FLAGS
from attn_reg_plugin.terminal import say


@dataclass(frozen=True, kw_only=True)
class TranslationComparison(Recipe, TrainingPart, Comparison):
    """The settings of `attn-reg compare`."""

    data: Path = setting("folder made by `attn-reg prepare`", metavar="DATA", positional=True)
    beam: int = setting("beam of the translation", 5, within="[1, inf)")
    metric: str = setting(
        "checkpoints are chosen by it, measured on the validation set after every epoch; bleu and chrf are of the "
        "pieces joined, with the beam of the translation",
        "loss",
        choices=("loss", "nll_loss", "bleu", "chrf"),
    )
    generate_flags: str = setting("more flags of fairseq-generate, in one text", "", metavar="FLAGS")
    opus_mt: Path | None = setting(
        "start from an OPUS-MT model: the folder of `attn-reg convert opus-mt`, with which DATA was prepared too; it "
        "sets the model's sizes, and how pieces become text",
        None,
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        """Check what depends on several settings."""
        Recipe.__post_init__(self)
        Comparison.__post_init__(self)
        with refusing("train_fraction"):
            self.sampling(1)

    @property
    def decided(self) -> Mapping[str, str]:
        """Also the task; and with a metric, the flags that it stands for."""
        return DECIDED | {"--task": ""} | (CHOOSING if self.metric != "loss" else {})

    def plan(self, methods: Sequence[Method]) -> list[Run]:
        """The runs, with the flags of both commands."""
        for name, path in (("DATA", self.data), ("--out", self.out)):
            refuse_split(name, path)
        data = DataFolder.open(self.data)
        if self.opus_mt is None and self._joining() is None and data.has_other_pieces():
            raise ValueError(
                f"{data.target_dictionary} has none of sentencepiece's pieces with a space (▁); say how to join "
                "its own by --generate-flags '--post-process subword_nmt', 'none' for words, or 'sentencepiece'"
            )
        model = self.sizes(data.joint) if self.opus_mt is None else opus_mt_model(self.opus_mt)
        pairs = _pairs(data)

        def common(sampling: Sampling, updates: int | None = None) -> list[str]:
            left = None if pairs is None else len(sampling.of(range(pairs)))  # type: ignore[arg-type]
            flags = [*model, *self.optimization(left, updates), *sampling_flags(sampling), *self._selection()]
            return [*flags, *self.device_flags, *self._one_gpu()]

        given = [word.partition("=")[0] for word in (*model, *self.own_flags)]
        if any(method.name == UNTUNED for method in methods) and START not in given:
            raise ValueError(f"the method {UNTUNED!r} needs a model to start from: give {START} FILE after --")
        generate = ["--beam", str(self.beam), "--batch-size", "64", "--post-process", "sentencepiece"]
        generate += ["--no-progress-bar", *self.device_flags]
        generate += [] if self.opus_mt is None else _opus_mt_text(self.data)
        generate += split_flags("--generate-flags", self.generate_flags)

        def make(method: Method, seed: int, **where: object) -> Run:
            own = [*method.among(self.own_flags), *(self.standstill() if method.name == UNTUNED else [])]
            sampling = self.sampling(seed)
            flags = (*common(sampling), *own)
            one = Run(method, seed, data=data, train_flags=flags, generate_flags=tuple(generate), **where)  # type: ignore[arg-type]
            if not self.counts_updates:
                return one
            # the only update of the untrained model is no length of a training
            untuned = (*common(sampling), *self.own_flags)
            counted = replace(one, train_flags=untuned) if method.name == UNTUNED else one
            return replace(one, train_flags=(*common(sampling, updates_of(counted)), *own))

        return self.each(methods, make)

    def _joining(self) -> str | None:
        """How `--generate-flags` have pieces joined; None where they don't say."""
        given = values_of(split_flags("--generate-flags", self.generate_flags))
        how = given.get("--post-process", given.get("--remove-bpe"))
        return "subword_nmt" if how == "given" else how  # fairseq's default

    def _selection(self) -> list[str]:
        """The flags for the metric that checkpoints are chosen by; fairseq's default is the loss."""
        if self.metric not in ("bleu", "chrf"):
            return [] if self.metric == "loss" else ["--best-checkpoint-metric", self.metric]
        flags = [f"--eval-{self.metric}", "--eval-bleu-args", json.dumps({"beam": self.beam})]
        flags += ["--eval-bleu-detok", "space", "--eval-bleu-remove-bpe", self._joining() or "sentencepiece"]
        return [*flags, "--best-checkpoint-metric", self.metric, "--maximize-best-checkpoint-metric"]

    @property
    def longest(self) -> int:
        """Epochs of a run."""
        return self.epochs

    def summary(self, one: Run) -> str:
        """The BLEU of every test set."""
        scores = one.result()["translation"]["scores"].values()
        return f"BLEU {', '.join(format(score['bleu'], '.2f') for score in scores)}"

    def report(self, console: Console, methods: Sequence[Method], runs: Sequence[Run]) -> None:
        """The table, and the learning curves."""
        data, first = runs[0].data, runs[0].result()
        scores, loss = next(iter(first["translation"]["scores"].values())), first["training"]["loss"]
        signatures = {"bleu": scores["bleu_signature"], "chrf": scores["chrf_signature"]}
        notes = [
            f"{data.source} → {data.target}, seeds {seeds_of(runs)}",
            f"BLEU {signatures['bleu']}",
            f"chrF {signatures['chrf']}",
            f"best valid {loss}: the lowest over all validations"
            + (", bits per piece, without label smoothing" if loss == "nll_loss" else ""),
            "s/epoch: seconds in updates, without validation and saving",
            *([] if self.metric == "loss" else [f"checkpoints chosen by the best {self.metric} on the validation set"]),
            *self.part_notes(_pairs(data)),
        ]
        results = {method.name: [one.result() for one in runs if one.method == method] for method in methods}
        rows = summarize(methods, results, differences(runs))
        content = {"pair": [data.source, data.target], "signatures": signatures, "loss": loss}
        content |= {"methods": [asdict(row) for row in rows], "runs": recorded(runs)}
        self.publish(console, cells(rows, loss), [*notes, *statistics_notes(rows)], content)
        self._draw(console, methods, runs, loss)

    def _draw(self, console: Console, methods: Sequence[Method], runs: Sequence[Run], loss: str) -> None:
        """Draw the learning curves, and say where table and picture are."""
        logged = [one for one in runs if one.has_log()]  # a finished run needs its log for nothing else
        by_method = {method.title: [one.log() for one in logged if one.method == method] for method in methods}
        say(console, f"table: {self.out / 'results.md'}")
        try:
            if plot_validation(by_method, loss, self.out / CURVES):
                say(console, f"learning curves: {self.out / CURVES}")
        except ValueError as error:
            say(console, f"no picture of the learning curves: {error}")


def _pairs(data: DataFolder) -> int | None:
    """Training pairs, as `attn-reg prepare` counted them; None where it did not make the folder."""
    path = data.root / MANIFEST
    splits = read_json(path).get("splits", {}) if path.is_file() else {}
    return splits.get("train", {}).get("kept")


def opus_mt_model(folder: Path) -> list[str]:
    """The flags of fairseq-train for a converted model: its sizes, and its weights to start from.

    Raises:
        FileNotFoundError: the folder wasn't written by `attn-reg convert opus-mt`.
    """
    path = folder / FLAGS
    if not path.is_file():
        raise FileNotFoundError(f"--opus-mt {folder} has no {FLAGS}; make it with `attn-reg convert opus-mt`")
    # every rank reads the checkpoint: what fairseq sends from the first to the others, torch.load refuses to read
    start = [START, str(folder / CHECKPOINT), "--load-checkpoint-on-all-dp-ranks"]
    return [*shlex.split(path.read_text(encoding="utf-8")), *start]


def _opus_mt_text(data: Path) -> list[str]:
    """The flags of fairseq-generate for text as MarianTokenizer makes it, which may be empty."""
    return ["--post-process", "none", "--bpe", "opus_mt", "--opus-mt-folder", str(data / "opus_mt"), "--min-len", "0"]
