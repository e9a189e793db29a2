"""Tables of docs/evidence.md that put several experiments together, for `evidence.py`.

Rows of one experiment are compared with each other over seeds and examples where both results keep the scores of single
examples, else over seeds only (Student's t).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from evidence_captions import caption, settings_of
from evidence_results import GLUE, PAGE, RESULTS, TEST_SETS, Experiment, Row, Series

from attn_reg_plugin.experiments.report.differences import Difference, interval, over_seeds
from attn_reg_plugin.files import read_json

#: an experiment, its part and a method
Place = tuple[str, str, str]
#: a method minus another, of one experiment and part; `EXPERIMENT/METHOD` of another one with the same seeds
Contrast = tuple[str, str, str, str]
#: experiment -> its heading
HEADINGS = {
    "ten_seeds": "Phrasebook, a quarter wrong: ten seeds",
    "noisy_phrasebook": "Phrasebook, a quarter wrong: all methods",
    "ten_seeds_36": "Phrasebook for 36 epochs: a quarter wrong",
    "phrasebook_draws": "Phrasebook, a quarter wrong: further draws",
    "noise_levels": "Phrasebook, by share of wrong targets",
    "drop_rates": "Phrasebook, a quarter wrong: drop rates",
    "phrasebook_controls": "Phrasebook, a quarter wrong: controls, and whole tokens",
    "translation": "Tatoeba en-ro, by share of wrong targets",
    "tokens_translation": "Tatoeba en-ro, a quarter wrong: whole tokens",
    "translation_tr_en": "Tatoeba tr-en",
    "opus_mt": "OPUS-MT en-fr adapted to TICO-19",
    "sst2_seeds": "SST-2, 1,000 sentences: eight seeds",
    "sst2_rivals": "SST-2, 1,000 sentences: all rows",
    "label_noise": "SST-2 with wrong labels, by share",
    "shortcuts": "SST-2 with planted words, 95 %",
    "shortcuts_float32": "SST-2 with planted words, 95 %, in fp32",
    "shortcut_shares": "SST-2 with planted words, by share",
    "shortcut_shares_float32": "SST-2 with planted words, by share, in fp32",
    "tokens": "SST-2 with planted words, by share: whole tokens",
    "tokens_last": "SST-2 with planted words, 80 %, last epoch: whole tokens",
    "tokens_words": "SST-2 with other planted words: whole tokens",
    "tokens_variants": "SST-2 with other plants: whole tokens",
    "tokens_settings": "SST-2 with planted words, 80 %: settings of whole tokens",
    "tokens_pairs": "Pairs with planted words: whole tokens",
    "tokens_domains": "Another domain: whole tokens",
    "tokens_names": "WNUT-17, unseen names: whole tokens",
    "few_shot": "SST-2, few sentences a class",
    "qnli": "QNLI, 1,000 pairs: AD-DROP's settings",
    "qnli_rivals": "QNLI, 1,000 pairs: other methods, in fp32",
    "glue_regime": "GLUE in the paper's regime",
    "attend_out_regime": "CoLA in AttendOut's regime",
    "encoders": "CoLA, MRPC and STS-B",
    "encoder_settings": "CoLA: how the settings were chosen",
    "encoder_objectives": "CoLA: what is attributed",
    "regression_objectives": "STS-B: what is attributed",
    "label_noise_cola": "CoLA with wrong labels",
    "training_size": "STS-B, by training examples and epochs",
    "mnli": "MNLI, in and out of distribution",
}
#: the parts of few_shot: sentences a class, of MiniLM, of gte-small and of MPNet-base
FEW = ["16", "64", "256", *TEST_SETS["few_shot"].values()]
#: question -> rows whose difference to plain training answers it; others are in the tables of their experiments
SUMMARY: dict[str, Sequence[Place]] = {
    "Does dropping attention help on a small noisy corpus?": [
        ("ten_seeds", "", "attention_dropout"),
        ("ten_seeds", "", "ad_drop"),
        ("ten_seeds", "", "r_drop"),
        ("phrasebook_controls", "", "label_smoothing"),
    ],
    "With twice the epochs?": [
        ("ten_seeds_36", "", name)
        for name in ("dropout_20", "ad_drop", "dropout_30", "ad_drop_dropout_30", "r_drop_dropout_30")
    ],
    "If much is dropped?": [("drop_rates", "", "ad_drop_30")],
    "On real text?": [("translation", "0, Tatoeba", "ad_drop")],
    "Where a published translation model is adapted?": [
        ("opus_mt", f"{pairs}, TICO-19", name)
        for pairs in ("250 pairs", "250 pairs, 25 % wrong", "1,000 pairs", "1,000 pairs, 25 % wrong")
        for name in ("dropout_20", "r_drop", "ad_drop")
    ],
    "On SST-2?": [("sst2_seeds", "", "ad_drop")],
    "With few sentences, in the paper's regime?": [
        ("few_shot", shots, "ad_drop_first_layer") for shots in FEW if "MPNet-base" in shots
    ],
    "On QNLI?": [("qnli", "", "ad_drop_first"), ("qnli", "", "ad_drop"), ("qnli_rivals", "", "r_drop")],
    "On CoLA, MRPC, STS-B?": [("encoders", task, "ad_drop") for task in ("CoLA", "MRPC", "STS-B")],
    "On GLUE, in the paper's regime?": [
        ("glue_regime", task, "ad_drop") for task in [*GLUE.values(), "RTE, MPNet-base"]
    ],
    "AttendOut, in its paper's regime?": [("attend_out_regime", "", "attend_out")],
    "With wrong labels?": [("label_noise", "0.25", "ad_drop"), ("label_noise_cola", "0.1", "ad_drop")],
    "With a word that gives the label away?": [("shortcuts", "", "ad_drop")],
    "If whole tokens are hidden?": [
        ("tokens", "0.95", "ad_drop_tokens"),
        ("tokens_last", "", "ad_drop_tokens"),
        ("tokens_last", "", "ad_drop_random_tokens"),
        ("tokens", "0.5", "ad_drop_tokens"),
        ("tokens", "0", "ad_drop_tokens"),
        ("tokens_words", "psychiatric,railway", "ad_drop_tokens"),
        ("tokens_pairs", "qnli", "ad_drop_tokens"),
        ("tokens_domains", "sst2_to_imdb", "ad_drop_tokens"),
        ("tokens_translation", "Tatoeba", "ad_drop_tokens"),
    ],
    "On MNLI, and against its heuristics?": [
        *[("mnli", "matched", name) for name in ("ad_drop", "ad_drop_tokens")],
        *[("mnli", "HANS", name) for name in ("ad_drop", "plain_2")],
    ],
}
#: further tables of differences to plain training: name -> rows
SELECTED: dict[str, Sequence[Place]] = {
    "gold": [
        ("shortcut_shares_float32", "0", "ad_drop_gold"),
        ("shortcut_shares_float32", "0.5", "ad_drop_gold"),
        ("shortcut_shares_float32", "0.8", "ad_drop_gold"),
        ("shortcuts_float32", "", "ad_drop_gold"),
        ("encoder_objectives", "", "ad_drop_gold"),
        ("regression_objectives", "", "ad_drop_gold"),
    ],
    "attend_out": [
        ("attend_out_regime", "", "attend_out"),
        ("noisy_phrasebook", "", "attend_out"),
        ("sst2_rivals", "", "attend_out"),
        ("qnli_rivals", "", "attend_out"),
        ("shortcuts_float32", "", "attend_out"),
    ],
}
#: AD-DROP and random candidates, with twice the epochs
LONGER: Contrast = ("ten_seeds_36", "", "ad_drop", "ad_drop_rd")
#: rows compared with each other
CONTRASTS: Sequence[Contrast] = [
    ("ten_seeds", "", "ad_drop", "ad_drop_rd"),
    ("ten_seeds", "", "ad_drop", "attention_dropout"),
    ("ten_seeds", "", "r_drop", "ad_drop_rd"),
    *[("noise_levels", share, "ad_drop", "ad_drop_rd") for share in ("0", "0.1", "0.5")],
    *[
        ("ten_seeds", "", method, f"phrasebook_controls/{control}")
        for method, control in [
            ("attention_dropout", "dropout_20"),
            ("attention_dropout", "label_smoothing"),
            ("ad_drop", "dropout_20"),
            ("ad_drop", "label_smoothing"),
            ("r_drop", "label_smoothing"),
            ("r_drop", "two_passes"),
        ]
    ],
    *[("ten_seeds_36", "", method, "dropout_20") for method in ("ad_drop", "r_drop")],
    ("ten_seeds_36", "", "r_drop", "two_passes"),
    ("ten_seeds_36", "", "ad_drop", "attention_dropout"),
    LONGER,
    *[
        ("ten_seeds_36", "", f"{method}_dropout_30", "dropout_30")
        for method in ("ad_drop", "attention_dropout", "r_drop")
    ],
    ("noisy_phrasebook", "", "ad_drop", "ad_drop_low"),
    ("drop_rates", "", "ad_drop_30", "ad_drop_rd_30"),
    ("drop_rates", "", "ad_drop_09", "ad_drop_tuned"),
    ("shortcuts", "", "ad_drop_30", "ad_drop_rd_30"),
    ("qnli", "", "ad_drop", "ad_drop_rd"),
    *[("few_shot", shots, "ad_drop_first_layer", "random_first_layer") for shots in FEW],
    *[("glue_regime", task, "ad_drop", "ad_drop_rd") for task in GLUE.values()],
    *[("attend_out_regime", "", "attend_out", rival) for rival in ("scores_dropout_0.1", "attention_layer_drop")],
    ("mnli", "matched", "ad_drop", "ad_drop_rd"),
    *[("tokens", share, "ad_drop_tokens", "ad_drop_random_tokens") for share in ("0.95", "0.8", "0.5", "0.2")],
    ("tokens", "0.8", "ad_drop_tokens", "ad_drop"),
    ("tokens_last", "", "ad_drop_tokens", "ad_drop_random_tokens"),
    ("tokens_variants", "middle", "ad_drop_tokens", "ad_drop_random_tokens"),
    *[
        ("tokens_words", words, "ad_drop_tokens", "ad_drop_random_tokens")
        for words in ("municipality,headquartered", "psychiatric,railway")
    ],
    ("tokens_pairs", "qnli", "ad_drop_tokens", "ad_drop_random_tokens"),
]
#: of these the pairs of seeds are put together: AD-DROP and random candidates at every share of wrong targets
POOLED = (CONTRASTS[0], *CONTRASTS[3:6])
#: a method minus another, on each draw of the phrasebook
DRAWN = [(name, "plain") for name in ("attention_dropout", "ad_drop", "ad_drop_rd")] + [("ad_drop", "ad_drop_rd")]
#: cross-tuned rows whose chosen epochs are counted
TUNED: Sequence[Place] = [
    ("sst2_seeds", "", "ad_drop"),
    *[("qnli", "", name) for name in ("ad_drop", "ad_drop_03", "ad_drop_first", "ad_drop_rd")],
    *[("encoders", task, "ad_drop") for task in ("CoLA", "MRPC", "STS-B")],
    *[("glue_regime", task, "ad_drop") for task in GLUE.values()],
]
#: task -> the gain that AD-DROP's authors publish, in points, of the best of `SETTINGS` on the development set
PUBLISHED = {"CoLA": 4.3, "MRPC": 3.4, "RTE": 4.3}
SETTINGS = 81
#: experiments whose plain rows tell how much these tasks deviate over seeds
DEVIATING = ("encoders", "glue_regime")

Found = Mapping[str, Experiment | Series]


def part_of(found: Found, name: str, part: str) -> Experiment:
    """The experiment, or the part of a series."""
    one = found[name]
    return one.parts[part] if isinstance(one, Series) else one


def row_of(found: Found, place: Place) -> tuple[Experiment, Row]:
    """A row and the experiment that it is in."""
    part = part_of(found, *place[:2])
    return part, next(row for row in part.rows if row.method == place[2])


def heading(name: str, part: str = "") -> str:
    """The setting of an experiment or of a part, for a cell."""
    title = HEADINGS[name].partition(":")[0]
    return part if part and part in title else f"{title}{f' ({part})' * bool(part)}"


def linked(name: str, part: str = "") -> str:
    """Link the setting to its experiment's table and caption."""
    return f"[{heading(name, part)}]({address(name)})"


def address(name: str) -> str:
    """Where an experiment's table is: in the evidence or else in the appendix."""
    section = places(PAGE).get(name)
    page, section = ("evidence", section) if section else ("appendix", HEADINGS[name])
    anchor = re.sub("[ -]+", "-", re.sub(r"[^\w -]", "", section).strip().lower())
    return f"{page}.md#{anchor}"


@cache
def places(path: Path) -> dict[str, str]:
    """The names of the tables that a page has places for, and the section that each is in."""
    found = re.split("^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: one.partition("\n")[0] for one in found for name in re.findall(r"<!-- table (\w+) -->", one)}


def lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    shown = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in shown).replace("| --- ", "|---").replace("--- |", "---|")


def marked(difference: Difference) -> str:
    """A difference with its interval, none where all seeds have the same; one over seeds only has a mark."""
    if difference.drawn == "seeds" and difference.low == difference.high:
        return replace(difference, low=None, high=None).text(2)
    return difference.text(2) + "†" * (difference.drawn == "seeds")


def differing(found: Found, place: Place) -> list[str]:
    """Cells of a row: the setting, the row with its settings, its difference to plain training, and the seeds."""
    part, row = row_of(found, place)
    settings, title = settings_of(row), row.title
    if settings:
        values = "" if settings[0].replace("p ", "").replace(", q ", " and ") in title else f"{settings[0]}, "
        title = f"{title} ({values}{settings[1]}, {settings[2]})"
    difference = f"{marked(row.difference)} {part.metric.replace('_', ' and ')}"
    return [linked(*place[:2]), title, difference, str(row.difference.seeds)]


def summary(found: Found) -> str:
    """Questions and the rows that answer them; on draws and on chance they are means and contrasts."""
    rows = [[question, *differing(found, place)] for question, places in SUMMARY.items() for place in places]
    method = "attention_dropout"
    draws = over_seeds([*by_draw(found, method, "plain").values()])
    further = ["On more draws of it?", linked("phrasebook_draws")]
    further += [row_of(found, ("phrasebook_draws", "2", method))[1].title, f"{marked(draws)} BLEU"]
    chance = "Does attribution choose better than chance?"
    first = len(next(iter(SUMMARY.values())))
    rows[first:first] = [
        [*further, f"{draws.seeds} draws"],
        [chance, *pooled_cells(found)],
        [chance, *contrast_cells(found, LONGER)],
    ]
    shown = [[row[0] if not i or rows[i - 1][0] != row[0] else "", *row[1:]] for i, row in enumerate(rows)]
    return lines(["question", "setting", "row", "− plain [95 %]", "seeds"], shown)


def selected(found: Found, places: Iterable[Place]) -> str:
    """Rows of several experiments."""
    return lines(["setting", "row", "− plain [95 %]", "seeds"], [differing(found, place) for place in places])


def both_rows(found: Found, contrast: Contrast) -> list[Row]:
    """The rows of a contrast."""
    name, part, *methods = contrast
    parted = [method.rpartition("/") for method in methods]
    return [row_of(found, (other or name, part, method))[1] for other, _, method in parted]


def paired(found: Found, contrast: Contrast) -> list[float]:
    """A method's scores minus another's, seed by seed, of the seeds that both have."""
    one, other = (row.scores for row in both_rows(found, contrast))
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def compared(found: Found, contrast: Contrast) -> Difference:
    """A method minus another, over seeds and examples or over seeds only."""
    one, other = (row.examples for row in both_rows(found, contrast))
    student, shared = over_seeds(paired(found, contrast)), sorted(one.keys() & other.keys())
    if len(shared) < student.seeds:
        return student
    low, high = interval([(one[seed], other[seed]) for seed in shared])
    return Difference(student.mean, low, high, student.seeds, "seeds and examples")


def pooled_cells(found: Found) -> list[str]:
    """Cells of AD-DROP minus random candidates over all pairs of `POOLED`."""
    mean = over_seeds([value for contrast in POOLED for value in paired(found, contrast)])
    return ["Phrasebook, all shares", contrast_title(found, POOLED[0]), f"{marked(mean)} BLEU", f"{mean.seeds} pairs"]


def drawn(found: Found) -> str:
    """Tabulate the phrasebook's draws: differences of the same seeds, and of the further draws their mean."""
    rows = []
    for method, other in DRAWN:
        first = statistics.fmean(paired(found, ("ten_seeds", "", method, other)))
        further, titles = by_draw(found, method, other), contrast_title(found, ("phrasebook_draws", "2", method, other))
        rows.append([titles, *(f"{mean:+.2f}" for mean in [first, *further.values()])])
        rows[-1].append(marked(over_seeds(list(further.values()))))
    draws = found["phrasebook_draws"].parts
    header = ["BLEU", "draw 1, ten seeds", *(f"draw {draw}" for draw in draws), "mean of these [95 %]"]
    return f"{lines(header, rows)}\n\n{caption(found['phrasebook_draws'])}"


def by_draw(found: Found, method: str, other: str) -> dict[str, float]:
    """A method minus another on each further draw of the phrasebook, the mean over seeds."""
    draws = found["phrasebook_draws"].parts
    return {draw: statistics.fmean(paired(found, ("phrasebook_draws", draw, method, other))) for draw in draws}


def contrast_title(found: Found, contrast: Contrast) -> str:
    """The titles of the rows of a contrast."""
    return " minus ".join(row.title for row in both_rows(found, contrast))


def contrast_cells(found: Found, contrast: Contrast) -> list[str]:
    """Cells of a contrast: the setting, the rows, their difference, and the seeds."""
    difference, metric = compared(found, contrast), part_of(found, *contrast[:2]).metric
    setting, title = linked(*contrast[:2]), contrast_title(found, contrast)
    return [setting, title, f"{marked(difference)} {metric}", str(difference.seeds)]


def contrasts(found: Found) -> str:
    """Rows compared with each other."""
    rows = [*(contrast_cells(found, contrast) for contrast in CONTRASTS), pooled_cells(found)]
    return lines(["setting", "rows", "difference [95 %]", "seeds"], rows)


def chosen_epochs(found: Found) -> str:
    """Cross-tuned rows: which epochs were chosen, and the differences to plain training after each kind."""
    rows = []
    for place in TUNED:
        row = row_of(found, place)[1]
        plain = row_of(found, (*place[:2], "plain"))[1].scores
        cells = []
        for odd in (1, 0):
            seeds = [seed for seed, epoch in sorted(row.chosen.items()) if epoch % 2 == odd]
            cells += [str(len(seeds)), ", ".join(f"{row.scores[seed] - plain[seed]:+.1f}" for seed in seeds) or "–"]
        rows.append([linked(*place[:2]), row.title, *cells])
    plain, regularized = "plain epoch chosen", "AD-DROP's epoch chosen"
    return lines(["setting", "row", plain, "− plain, by seed", regularized, "− plain, by seed"], rows)


def expected_best(deviation: float, settings: int = SETTINGS) -> float:
    """How far the best of so many independent normal draws is above their mean, in expectation."""
    from scipy.stats import Normal, order_statistic

    return deviation * float(order_statistic(Normal(), r=settings, n=settings).mean())


def best_of_many(found: Found) -> str:
    """Tabulate what the best of `SETTINGS` gains by chance, by the deviation over seeds that was measured here."""
    rows = []
    for task, gain in PUBLISHED.items():
        plain = [row_of(found, (name, task, "plain"))[1] for name in DEVIATING if task in found[name].parts]
        own = [" and ".join(f"{row.score.std:.2f}" for row in plain) or "not measured"]
        own.append(" and ".join(f"+{expected_best(row.score.std):.1f}" for row in plain) or "–")
        rows.append([task, *own, f"+{gain}", f"{gain / expected_best(1):.2f}"])
    best = f"best of {SETTINGS} without any effect"
    return lines(["task", "deviation over seeds here", best, "published gain", "deviation that gives it"], rows)


def chosen_on_a_half(right: np.ndarray, halvings: int = 1000) -> tuple[float, float]:
    """Score of the best run on one half of the examples, and of the same run on the other, mean of random halvings.

    Args:
        right: bool (runs, examples).
    """
    draw, middle = np.random.default_rng(1), right.shape[1] // 2
    found = []
    for _ in range(halvings):
        order = draw.permutation(right.shape[1])
        one, other = (right[:, part].mean(1) for part in (order[:middle], order[middle:]))
        found.append((one.max(), other[one.argmax()]))
    return tuple(100 * np.mean(found, axis=0))


def halves(found: Found) -> str:
    """Tabulate halves.json: the best of the runs of an arm, chosen on a half of the development set."""
    runs, rows = read_json(RESULTS / "halves.json"), []
    for arm, title in {"plain": "plain, 27 seeds", "trial": "AD-DROP, 27 trials of p and q"}.items():
        right = np.array([list(run["right"]) for name, run in runs.items() if name.startswith(arm)]) == "1"
        scores, (there, beyond) = 100 * right.mean(1), chosen_on_a_half(right)
        rows.append([title, f"{scores.mean():.2f} ± {scores.std(ddof=1):.2f}", f"{there:.2f}", f"{beyond:.2f}"])
    return lines(["", "all", "the best on one half, there", "on the other half"], rows)


def searched(found: Found) -> str:
    """Tabulate glue_settings.json: trials of p and q and seeds of plain training, the best first."""
    trials = sorted(read_json(RESULTS / "glue_settings.json")["trials"], key=lambda trial: -trial["value"])
    rows = []
    for one in trials:
        title = "plain" if one["arm"] == "plain" else f"AD-DROP, {one['p']} and {one['q']}"
        rows.append([title, f"{one['value']:.2f}", str(one["seed"])])
    return lines(["", "held-out mcc", "seed"], rows)


def card(found: Found) -> str:
    """Tabulate card.json: translations by fairseq-generate and by transformers."""
    (sets,), rows = read_json(RESULTS / "card.json").values(), []
    for subset, one in sets.items():
        bleu = [f"{one['bleu'][name]:.2f}" for name in ("fairseq", "transformers")]
        title = TEST_SETS["opus_mt"][subset]
        rows.append([title, str(one["sentences"]), str(one["same"]), *bleu])
    return lines(["", "sentences", "translated alike", "BLEU, fairseq-generate", "BLEU, transformers"], rows)


def tables(found: Found) -> dict[str, str]:
    """Make every table of this file, by name."""
    makers = (summary, contrasts, chosen_epochs, best_of_many, halves, card, searched)
    made = {make.__name__: make(found) for make in makers} | {"draws": drawn(found)}
    return made | {name: selected(found, places) for name, places in SELECTED.items()}
