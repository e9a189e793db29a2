"""A configuration at toy size: a tiny random model, 50 made-up examples, one epoch, one seed, few trials.

Methods and their settings stay as they are. Everything is written beside the configuration's folder, in `...-toy`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from attn_reg_plugin.experiments.comparison import TO_THE_END
from attn_reg_plugin.experiments.steps import EACH, Step, plan
from tests.experiments.starting import quick_starts

T = TypeVar("T")
ENDING = "-toy"
#: the folder of made-up files beside a step's own
MADE_UP = "made-up"
PAIRS = {"train": 50, "valid": 20, "test": 20}
#: pairs that the pieces of a made-up OPUS-MT model come from
_PIECES_FROM = 300
#: AttendOut's round takes T updates, so a toy epoch has more of them
_BATCH, _BATCH_OF_ROUNDS = 16, 4
_TRIALS = 2
#: made-up test sets of the scripts, by the flag that names them
TEST_SETS = {
    "--hans": "gold_label\tsentence1\tsentence2\theuristic\n"
    + "entailment\tw1 w2\tw1\tsubsequence\nnon-entailment\tw1 w2\tw2 w1\tlexical_overlap\n" * 4,
    "--pairs": "id\tsentence1\tsentence2\tlabel\n" + "1\tw1 w2\tw2 w1\t0\n2\tw1 w2\tw1 w2\t1\n" * 4,
}
_EVERY_UPDATE = "--log-interval 1"


def toy_steps(path: Path, *words: str) -> list[Step]:
    """The steps of a file at toy size, of each name in `each` the first value that is not among the flags."""
    content = OmegaConf.to_container(OmegaConf.load(path))
    names = {name: values[0] for name, values in content.get(EACH, {}).items() if f"--{name}" not in words}
    flags = [word for name, value in names.items() for word in (f"--{name}", str(value))]
    if "out" in content and "--out" not in words:
        flags += ["--out", f"{content['out']}{ENDING}"]
    found, data = [], {}
    for step in plan(path, [*words, *flags]):
        found.append(step)
        if isinstance(step.settings, list):
            step.settings = toy_words(step.settings, data)
        elif dataclasses.is_dataclass(step.settings):
            given, step.settings = step.settings, toy_of(step.settings)
            data[str(getattr(given, "data", None))] = str(getattr(step.settings, "data", None))
    return found


def toy_words(words: list[str], data: Mapping[str, str]) -> list[str]:
    """The words of a script, with made-up files where it reads others; `data` has toy folders by the steps' own."""
    for folder, toy in data.items():
        words = [toy + word.removeprefix(folder) if word.startswith(f"{folder}/") else word for word in words]
    for place, word in enumerate(words[:-1]):
        if word in TEST_SETS and not Path(words[place + 1]).exists():
            path = Path(words[words.index("--out") + 1]).parent / MADE_UP / Path(words[place + 1]).name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(TEST_SETS[word], encoding="utf-8")
            words[place + 1] = str(path)
    return words


def run_toy(path: Path, *words: str) -> None:
    with quick_starts():
        for step in toy_steps(path, *words):
            if dataclasses.is_dataclass(step.settings):
                make_files(step.settings)
            assert step.carry_out() == 0


def aside(path: Path) -> Path:
    """A folder's place at toy size; one that is in such a place stays there."""
    if any(part.endswith(ENDING) for part in path.parts):
        return path
    return path.with_name(path.name + ENDING)


def toy_of(settings: T) -> T:
    own = _VALUES.get(type(settings).__name__, lambda _: {})
    return dataclasses.replace(settings, **own(settings))  # type: ignore[type-var]


def make_files(settings: Any) -> None:
    """Write the made-up files that a step at toy size reads, unless they are there."""
    _MAKERS.get(type(settings).__name__, lambda _: None)(settings)


def _comparison(settings: Any) -> dict[str, Any]:
    methods = settings.selected()
    # AD-DROP's first epoch is plain, so it needs a second one to do anything
    epochs = 2 if any(method.flags.get("ad-drop-cross-tuning") == "epoch" for method in methods) else 1
    rounds = any(method.regularizer == "attend_out" for method in methods)
    batch = min(settings.batch_size or _BATCH, _BATCH_OF_ROUNDS if rounds else _BATCH)
    shared = {"out": aside(settings.out), "seeds": settings.seeds[:1], "cpu": True}
    if _EVERY_UPDATE not in settings.train_flags:  # few updates: curves need each of them
        shared["train_flags"] = f"{settings.train_flags} {_EVERY_UPDATE}".strip()
    return {**shared, "epochs": min(epochs, settings.epochs), "batch_size": batch}


def _fine_tuning(settings: Any) -> dict[str, Any]:
    from tests.labelled.made_up import PAPER_SHAPE, family_of

    out, longest = aside(settings.out), PAPER_SHAPE["max_position_embeddings"]
    values = _comparison(settings)
    values |= {"data": str(out / MADE_UP / settings.task), "max_length": min(settings.max_length, longest - 8)}
    values |= {"model": str(out / MADE_UP / family_of(settings.model or "").lower())}
    if settings.train_fraction < 1:  # of few examples, so that some are left where a part of them is held out
        values |= {"train_fraction": max(settings.train_fraction, 0.4)}
    if settings.train_examples:
        values |= {"train_examples": max(settings.train_examples, 20)}
    shares = ("label_noise", "shortcut")
    values |= {name: max(getattr(settings, name), 0.4) for name in shares if getattr(settings, name)}
    return values | {"train_per_class": min(settings.train_per_class, 4), "shortcut_words": ()}


def _translation(settings: Any) -> dict[str, Any]:
    values = _comparison(settings)
    values |= {"embed_dim": 16, "ffn_dim": 24, "heads": 2, "max_tokens": min(settings.max_tokens, 1024), "beam": 2}
    # few updates: where they are counted, a warm-up would be all of them
    values |= {
        "warmup": 0 if settings.lr_scheduler in TO_THE_END else min(settings.warmup, 4),
        "data": aside(settings.data),
    }
    values |= {"generate_flags": f"{settings.generate_flags} --max-len-a 0 --max-len-b 10".strip()}
    return values | {"opus_mt": None if settings.opus_mt is None else aside(settings.opus_mt)}


def _sweep(settings: Any) -> dict[str, Any]:
    from attn_reg_plugin.experiments.sweep.settings import DECIDED

    searched = settings.comparison()
    base = toy_of(searched)
    own = {entry.name: getattr(base, entry.name) for entry in dataclasses.fields(base)}
    own = {name: value for name, value in own.items() if value != getattr(searched, name)}
    own = {name: str(value) if isinstance(value, Path) else value for name, value in own.items()}
    own = {name: value for name, value in own.items() if name not in DECIDED}
    # the sweep's method isn't among those of its trainings
    own["epochs"] = min(2, searched.epochs)
    values = {settings.section: {**getattr(settings, settings.section), **own}, "out": aside(settings.out)}
    values |= {"seeds": settings.seeds[:1], "trials": min(settings.trials, _TRIALS)}
    return values if settings.trials else {**values, "space": _smaller(settings.space)}


def _smaller(space: Mapping[str, Any]) -> dict[str, Any]:
    """The first two values of the first two keys, and the first value of the others."""
    return {key: list(given)[: 2 if place < 2 else 1] for place, (key, given) in enumerate(space.items())}


def _phrasebook(settings: Any) -> dict[str, Any]:
    return {**PAIRS, "out": aside(settings.out), "vocab_size": min(settings.vocab_size or 150, 150)}


def _wmt16(settings: Any) -> dict[str, Any]:
    out = aside(settings.out)
    values: dict[str, Any] = {"out": out, "source": str(out.parent / MADE_UP / "text"), "limit": PAIRS["train"]}
    values |= {"origin": (), "set_aside": min(settings.set_aside, 10)}
    values |= {"noise": max(settings.noise, 0.1) if settings.noise else 0.0}
    if settings.opus_mt is None:
        return values | {"vocab_size": min(settings.vocab_size or 150, 150), "spm_model": None}
    # what was filled in for it isn't given again
    return values | {"opus_mt": aside(settings.opus_mt), "vocab_size": None}


def _opus_mt(settings: Any) -> dict[str, Any]:
    out = aside(settings.out)
    return {"out": out, "model": str(out.parent / MADE_UP / "marian")}


def _bench(settings: Any) -> dict[str, Any]:
    small = {"size": "tiny", "device": "cpu", "repeats": 1, "warmup": 0, "threads": 1}
    return {**small, **dict.fromkeys(("batch", "length", "vocabulary"))}


_VALUES = {
    "Settings": _bench,
    "FineTuning": _fine_tuning,
    "TranslationComparison": _translation,
    "Sweep": _sweep,
    "PhrasebookOptions": _phrasebook,
    "Wmt16Options": _wmt16,
    "Conversion": _opus_mt,
}


def _make_labelled(settings: Any) -> None:
    from tests.labelled.made_up import PAPER_SHAPE, family_of, make_encoder, make_task

    if not Path(settings.data).is_dir():
        make_task(Path(settings.data), Path(settings.data).name)
    folder = Path(settings.model)
    if not folder.is_dir():
        make_encoder(folder, family_of(folder.name), **PAPER_SHAPE)


def _make_text(settings: Any) -> None:
    from attn_reg_plugin.corpora.phrasebook import splits

    settings.source.mkdir(parents=True, exist_ok=True)
    for split, triples in splits(**PAIRS).items():
        for language in ("en", "ro", "tr"):
            lines = "".join(f"{getattr(triple, language)}\n" for triple in triples)
            (settings.source / f"{split}.{language}").write_text(lines, encoding="utf-8")


def _make_marian(settings: Any) -> None:
    from attn_reg_plugin.corpora.phrasebook import splits
    from tests.opus_mt.folders import make_marian

    if Path(settings.model).is_dir():
        return
    source, _, target = settings.languages.partition("-")
    phrases = splits(_PIECES_FROM, 1, 1)["train"]
    texts = [[getattr(phrase, language) for phrase in phrases] for language in (source, target)]
    make_marian(Path(settings.model), (source, target), texts)


_MAKERS = {
    "FineTuning": _make_labelled,
    "Sweep": lambda settings: make_files(settings.comparison()),
    "Wmt16Options": _make_text,
    "Conversion": _make_marian,
}
