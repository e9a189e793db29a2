"""`attn-reg compare`: train, translate and score several methods on the same corpus; one table.

Each method and seed is a run of fairseq-train and fairseq-generate in a folder of its own under `out`. What is done is
not done again, and an interrupted training goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.dictionaries import check_binaries
from attn_reg_plugin.experiments.comparison import (
    CHOOSING,
    SCHEDULERS,
    TO_THE_END,
    TRAINING,
    Comparison,
    refuse_decided,
    schedule_flags,
)
from attn_reg_plugin.experiments.data_folder import DataFolder, digest_of, refuse_split, sha256_of
from attn_reg_plugin.experiments.running.checks import updates_of
from attn_reg_plugin.experiments.running.flags import START, UNTUNED, named, parsed, words_of
from attn_reg_plugin.experiments.running.run import TRANSLATION, USER_DIR, Run
from attn_reg_plugin.files import raw_lines, write_text

if TYPE_CHECKING:
    from attn_reg_plugin.experiments.methods import Method

#: the fairseq task that every method is trained with; with `--attn-reg none` it is plain translation
TASK = "attn_reg_translation"
#: flags of both commands that the data decide
_LANGUAGES = dict.fromkeys(("source-lang", "target-lang", "-s", "-t"), "data")
#: D-<sample id>, the score, the detokenized translation (which may be empty)
_HYPOTHESIS = re.compile(r"D-(\d+)\t[^\t]*\t(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class TranslationComparison(Comparison):
    """The settings of `attn-reg compare`: a Transformer base by default."""

    GROUP: ClassVar[str] = TRAINING
    USAGE: ClassVar[str] = "attn-reg compare [CONFIG | DATA] --out FOLDER [options] [-- flags of fairseq-train]"
    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg compare data/en-ro --out runs/en-ro --methods plain,ad_drop,attend_out --seeds 1,2,3",
        "attn-reg compare examples/demo/demo.yaml runs/demo/data --out runs/longer --epochs 24",
    )

    data: Path = setting("folder made by `attn-reg prepare`", metavar="DATA", positional=True)
    opus_mt: Path | None = setting(
        "start from this folder of `attn-reg convert opus-mt`, with which DATA was prepared too", None, group="data"
    )
    arch: str = setting(
        "fairseq architecture; the sizes below override its own; not with --opus-mt, which has its own", "transformer"
    )
    layers: int = setting("layers of the encoder and of the decoder", 6, within="[1, inf)")
    embed_dim: int = setting("width of the model", 512, within="[1, inf)")
    ffn_dim: int = setting("width of the feed-forward layers", 2048, within="[1, inf)")
    heads: int = setting("attention heads", 8, within="[1, inf)")
    dropout: float | None = setting("residual dropout (default: that of --opus-mt, else 0.3)", None, within="[0, 1)")
    max_tokens: int = setting("tokens in a batch", 4096, within="[1, inf)")
    batch_size: int = setting("sentences in a batch, at most; 0: as many as --max-tokens allows", 0, within="[0, inf)")
    update_freq: int = setting("batches in an update", 1, within="[1, inf)")
    epochs: int = setting("epochs of training", 30, within="[1, inf)")
    lr: float = setting("peak learning rate of Adam", 5e-4, within="(0, inf)")
    lr_scheduler: str = setting(
        "course of the learning rate after the warm-up", "inverse_sqrt", choices=tuple(SCHEDULERS)
    )
    warmup: int = setting("updates of warm-up", 4000, within="[0, inf)")
    weight_decay: float = setting("weight decay", 1e-4, within="[0, inf)")
    clip_norm: float = setting("clip gradients at this norm; 0 is off", 0.0, within="[0, inf)")
    label_smoothing: float = setting("label smoothing", 0.1, within="[0, 1)")
    metric: str = setting(
        "checkpoints are chosen by it, on the validation set", "loss", choices=("loss", "nll_loss", "bleu")
    )
    beam: int = setting("beam of the translation", 5, within="[1, inf)")
    generate_flags: str = setting("more flags of fairseq-generate, in one text", "", metavar="FLAGS")

    def __post_init__(self) -> None:
        """Check what depends on several settings."""
        if self.opus_mt is None and self.embed_dim % self.heads:
            raise ValueError(f"--heads {self.heads} does not divide --embed-dim {self.embed_dim}")
        super().__post_init__()
        given = parsed("--generate-flags", self.generate_flags)
        decided = dict.fromkeys(("task", "path", "results-path", "gen-subset"), "") | _LANGUAGES
        refuse_decided("--generate-flags", given, decided)
        self._check_user_dir("--generate-flags", given)

    @property
    def decided(self) -> Mapping[str, str]:
        """Also task and languages; and with a metric, the flags that it stands for."""
        return {**super().decided, "task": "", **_LANGUAGES, **(CHOOSING if self.metric != "loss" else {})}

    def plan(self, methods: Sequence[Method]) -> list[Run]:
        """The runs, with the flags of both commands."""
        from attn_reg_plugin.experiments.report.examples import bleu_of

        for name, path in (("DATA", self.data), ("--out", self.out)):
            refuse_split(name, path)
        data = DataFolder.open(self.data)
        self.check_part(data.pairs())
        for subset in data.subsets:
            check_binaries(data.bin, subset, data.bin)
            lines, pairs = len(data.references(subset)), data.pairs(subset)
            if pairs and lines != pairs:
                path = data.root / "raw" / f"{subset}.{data.target}"
                raise ValueError(f"{path} has {lines} references, but {data.bin} has {pairs} sentences of {subset}")
        if bleu_of(data.target).tokenizer.signature() != "13a" and self.metric == "bleu":
            raise ValueError(f"--metric bleu: fairseq's own BLEU has no words of {data.target}; choose by the loss")
        if self.opus_mt is None and self._joining() is None and (path := data.other_pieces()):
            raise ValueError(
                f"{path} has none of sentencepiece's pieces with a space (▁); say how to join "
                "its own by --generate-flags '--post-process subword_nmt', 'none' for words, or 'sentencepiece'"
            )
        model = self._sizes(data.joint) if self.opus_mt is None else opus_mt_model(self.opus_mt, data)
        if any(one.name == UNTUNED for one in methods) and START not in {**model, **self.own_flags}:
            raise ValueError(f"the method {UNTUNED!r} needs a model to start from: give --{START} FILE after --")
        references = digest_of([data.root / "raw" / f"{subset}.{data.target}" for subset in data.subsets])
        about = {
            **{"kind": TRANSLATION, "task": f"{data.source}-{data.target}"},
            **{"data": data.digest(), "references": references, "subsets": list(data.subsets)},
            **{"generate": self._generation(), "paths": {"data": str(data.bin)}},
        }
        languages = {"task": TASK, "source-lang": data.source, "target-lang": data.target}
        # with its default, 8, fairseq leaves out the last batch unless that has a multiple of 8 sentences
        base = {**languages, "required-batch-size-multiple": 1, **model, **named(dropout=self.dropout)}

        def settings(method: Method, seed: int) -> dict[str, Any]:
            def flags(updates: int | None, own: Mapping[str, Any]) -> dict[str, Any]:
                return {**base, **self._optimization(updates), **self.example_flags(seed), **own}

            # fairseq-train takes every GPU there is, unless its own is one of several jobs'
            rest = {**self._selection(), **self.device_flags(alone=self.jobs > 1)}
            own, untuned = {**rest, **method.among(self.own_flags)}, method.name == UNTUNED
            updates = None
            if self.lr_scheduler in TO_THE_END:
                # the only update of the untrained model is no length of a training
                counted = flags(None, {**rest, **self.own_flags} if untuned else own)
                updates = updates_of(Run(self.out, {**about, "method": method.name, "seed": 1, "flags": counted}))
            # with which the first update changes no bit of the model
            still = {"lr": 0, **({"warmup-init-lr": 0} if self.lr_scheduler == "inverse_sqrt" else {})}
            return {**about, "flags": flags(updates, {**own, **(still if untuned else {})})}

        return self.each(methods, settings, TranslationRun)

    def _sizes(self, joint_dictionary: bool) -> dict[str, Any]:
        """The flags of fairseq-train for a new model; with a joint dictionary all embeddings are shared."""
        flags: dict[str, Any] = {"arch": self.arch, "dropout": 0.3}
        for side in ("encoder", "decoder"):
            flags |= {f"{side}-layers": self.layers, f"{side}-embed-dim": self.embed_dim}
            flags |= {f"{side}-ffn-embed-dim": self.ffn_dim, f"{side}-attention-heads": self.heads}
        return {**flags, "share-all-embeddings" if joint_dictionary else "share-decoder-input-output-embed": True}

    def _optimization(self, updates: int | None) -> dict[str, Any]:
        """The flags of fairseq-train for everything but the model, for a training of so many updates."""
        return {
            **named(weight_decay=self.weight_decay, label_smoothing=self.label_smoothing),
            **named(criterion="label_smoothed_cross_entropy", optimizer="adam", adam_betas="(0.9, 0.98)"),
            **named(clip_norm=self.clip_norm, lr=self.lr),
            **schedule_flags(self.lr_scheduler, self.warmup, updates),
            **({"warmup-init-lr": "1e-07"} if self.lr_scheduler == "inverse_sqrt" else {}),
            **named(max_tokens=self.max_tokens, update_freq=self.update_freq, max_epoch=self.epochs),
            **named(batch_size=self.batch_size or None),
            **({"distributed-world-size": 1} if self.lr_scheduler in TO_THE_END else {}),  # updates are counted for it
        }

    def _joining(self) -> str | None:
        """The way in which `--generate-flags` have pieces joined; None where they don't say."""
        given = parsed("--generate-flags", self.generate_flags)
        how = given.get("post-process", given.get("remove-bpe"))
        return "subword_nmt" if how is True else how  # fairseq's default

    def _selection(self) -> dict[str, Any]:
        """The flags for the metric that checkpoints are chosen by; fairseq's default is the loss."""
        if self.metric != "bleu":
            return {} if self.metric == "loss" else {"best-checkpoint-metric": self.metric}
        return {
            **{"eval-bleu": True, "eval-bleu-args": json.dumps({"beam": self.beam})},
            **{"eval-bleu-detok": "space", "eval-bleu-remove-bpe": self._joining() or "sentencepiece"},
            **{"best-checkpoint-metric": self.metric, "maximize-best-checkpoint-metric": True},
        }

    def _generation(self) -> dict[str, Any]:
        """The flags of fairseq-generate."""
        flags = {**named(beam=self.beam, batch_size=64, post_process="sentencepiece", no_progress_bar=True)}
        flags |= self.device_flags()
        if self.opus_mt is not None:  # text as MarianTokenizer makes it, which may be empty
            flags |= named(post_process="none", bpe="opus_mt", opus_mt_folder=str(self.data / "opus_mt"), min_len="0")
        return flags | parsed("--generate-flags", self.generate_flags)

    def notes(self, runs: Sequence[Run]) -> list[str]:
        """The languages, sacrebleu's signatures, and what the figures are."""
        loss = next(iter(runs[0].scores["valid"]))
        return [
            f"{' → '.join(runs[0].settings['task'].split('-'))}, seeds {', '.join(map(str, sorted(self.seeds)))}",
            *runs[0].result()["signatures"],
            f"valid {loss}: the lowest over all validations; nll_loss is in bits per piece, without label smoothing",
            f"checkpoints chosen by the best {runs[0].metric[0]} on the validation set",
            *self.part_notes(runs[0]),
        ]


def opus_mt_model(folder: Path, data: DataFolder) -> dict[str, Any]:
    """The flags of fairseq-train for a converted model, whose dictionaries the data have: its sizes and weights."""
    from attn_reg_plugin.corpora.pieces import OPUS_MT
    from attn_reg_plugin.opus_mt.conversion import CHECKPOINT, FLAGS
    from attn_reg_plugin.opus_mt.tokenization import TOKENIZER_FILES

    path = folder / FLAGS
    if not path.is_file():
        raise FileNotFoundError(f"--opus-mt {folder} has no {FLAGS}; make it with `attn-reg convert opus-mt`")
    for name in TOKENIZER_FILES:  # generation reads those of the data
        own = data.root / OPUS_MT / name
        ours, theirs = (sha256_of(path) if path.is_file() else None for path in (own, folder / name))
        if ours != theirs:
            what = "is missing" if ours is None else "is another one"
            raise ValueError(f"{data.root} was prepared without --opus-mt {folder}: its {OPUS_MT}/{name} {what}")
    return {**parsed(str(path), path.read_text(encoding="utf-8")), START: str(folder / CHECKPOINT)}


class TranslationRun(Run):
    """A training whose best checkpoint translates the test sets, scored by sacrebleu on raw references.

    Of its settings, `subsets` are the test sets and `generate` the flags of fairseq-generate.
    """

    def generate_command(self, subset: str) -> list[str]:
        """The command of fairseq-generate; stock translation, since the checkpoint is an ordinary one."""
        data = self.settings["paths"]["data"]
        languages = {name: self.flags[name] for name in ("source-lang", "target-lang")}
        return [
            # --user-dir also for translating: it lets torch load fairseq's checkpoints
            *(sys.executable, "-m", "fairseq_cli.generate", data, "--user-dir", str(USER_DIR)),
            *("--task", "translation", *words_of(languages), "--required-batch-size-multiple", "1"),
            *("--path", str(self.folder / "checkpoints" / "checkpoint_best.pt"), "--gen-subset", subset),
            *("--results-path", str(self.folder / "translations"), *words_of(self.settings["generate"])),
        ]

    def further_commands(self) -> list[list[str]]:
        """The translation of a test set."""
        return [self.generate_command(self.settings["subsets"][0])]

    def measure(self, lock: int, stop: Event | None = None) -> dict[str, Any]:
        """Translate and score the test sets; `valid` has the lowest validation loss."""
        data = DataFolder.open(Path(self.settings["paths"]["data"]).parent)
        scores, same, signatures = {}, [], []
        for subset in self.settings["subsets"]:
            command = self.generate_command(subset)
            self.execute(command, f"generate-{subset}.log", f"translation of {subset} with", lock, stop)
            references, folder = data.references(subset), self.folder / "translations"
            hypotheses = read_hypotheses(folder / f"generate-{subset}.txt", len(references))
            for name, lines in ((subset, hypotheses), (f"{subset}.references", references)):
                write_text(folder / f"{name}.{data.target}", "".join(f"{line}\n" for line in lines))
            scores[subset], signatures = score(hypotheses, references, data.target)
            same += [subset] if len(hypotheses) > 1 and len(set(hypotheses)) == 1 else []
        name, value = self.log().best_validation()
        return {"scores": {**scores, "valid": {name: value}}, "constant": same, "signatures": signatures}


def read_hypotheses(path: Path, count: int) -> list[str]:
    """The best translation of each of `count` sentences, sorted by sample id; all must be there, and no more.

    Args:
        path: the output of fairseq-generate, which translates in order of length.
    """
    found: dict[int, str] = {}
    for line in raw_lines(path):
        if match := _HYPOTHESIS.fullmatch(line):
            found.setdefault(int(match.group(1)), match.group(2))  # the best of an n-best list comes first
    missing = [index for index in range(count) if index not in found]
    if missing:
        raise ValueError(f"{path} holds {len(found)} translations of {count}; the first missing is {missing[0]}")
    if len(found) > count:
        raise ValueError(f"{path} holds {len(found)} translations, but there are {count} references")
    return [found[index] for index in range(count)]


def score(hypotheses: list[str], references: list[str], language: str) -> tuple[dict[str, float], list[str]]:
    """BLEU, see `bleu_of`, and chrF (0 to 100) of translations on raw references, and their signatures."""
    from sacrebleu.metrics import CHRF

    from attn_reg_plugin.experiments.report.examples import bleu_of

    metrics = {"bleu": bleu_of(language), "chrf": CHRF()}
    scores = {name: metric.corpus_score(hypotheses, [references]).score for name, metric in metrics.items()}
    names = {"bleu": "BLEU", "chrf": "chrF"}
    return scores, [f"{names[name]} {metric.get_signature()}" for name, metric in metrics.items()]
