"""The methods of comparisons: their flags from the registry, and settings of their own in a configuration."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from attn_reg_plugin.experiments.methods import fairseq_flags, known_methods, select_methods
from attn_reg_plugin.experiments.run_settings import values_of
from attn_reg_plugin.regularizers.base import REGISTRY
from attn_reg_plugin.regularizers.base.registry import presets_of

#: as runs were made with them before methods had presets: finished ones keep their meaning
EARLIER = {
    "untuned": "--attn-reg none --max-update 1",
    "plain": "--attn-reg none",
    "own_attention_dropout": "--attn-reg none --attention-dropout 0.3",
    "ad_drop": "--attn-reg ad_drop --ad-drop-p 0.3 --ad-drop-q 0.3 --attn-sites encoder.self "
    "--ad-drop-cross-tuning epoch",
    "attend_out": "--attn-reg attend_out --attn-sites encoder.self",
    "own_attention_dropout_0.1": "--attn-reg none --attention-dropout 0.1",
    "own_attention_dropout_0.2": "--attn-reg none --attention-dropout 0.2",
    "attention_layer_drop": "--attn-reg attention_layer_drop --attn-sites encoder.self --attention-layer-drop-p 0.2",
}
#: the papers' ablations and rivals, by what their flags add to the method's name
NAMED = {
    "ad_drop_ga": "--ad-drop-attribution gradient",
    "ad_drop_iga": "--ad-drop-attribution integrated",
    "ad_drop_aa": "--ad-drop-attribution attention",
    "ad_drop_rd": "--ad-drop-attribution random",
    "ad_drop_gold": "--ad-drop-labels gold",
    "ad_drop_low": "--ad-drop-direction low",
    "ad_drop_first_layer": "--attn-sites 'encoder.self[0]'",
    "ad_drop_without_cross_tuning": "--ad-drop-cross-tuning off",
    "scores_dropout_0.1": "--attn-reg attention_dropout --attention-dropout-where scores --attention-dropout-p 0.1",
    "scores_dropout_0.2": "--attn-reg attention_dropout --attention-dropout-where scores --attention-dropout-p 0.2",
    "attention_dropout": "--attn-reg attention_dropout --attention-dropout-where weights --attention-dropout-p 0.1",
    "layer_drop": "--attn-reg layer_drop --layer-drop-p 0.2",
    "head_drop": "--attn-reg head_drop --head-drop-p 0.2",
    "head_drop_v": "--head-drop-p 0.2 --head-drop-unit progress --head-drop-turn 0.3 --head-drop-end 1.0",
    "scheduled_dropout": "--attn-reg scheduled_dropout --scheduled-dropout-unit progress "
    "--scheduled-dropout-schedule 'drop encoder.self: 0:0.6 1:0.55..0.11'",
    "attention_layer_drop": "--attn-reg attention_layer_drop --attention-layer-drop-p 0.2",
    "ad_drop_kept": "--ad-drop-probe kept",
}


@pytest.mark.parametrize("name", NAMED)
def test_the_papers_rows_have_names(name: str) -> None:
    method, words = known_methods()[name], shlex.split(NAMED[name])
    given = dict(zip(method.flags[::2], method.flags[1::2], strict=True))
    assert dict(zip(words[::2], words[1::2], strict=True)).items() <= given.items()
    if method.regularizer == "ad_drop":
        base = known_methods()["ad_drop"].options
        assert len(method.options.items() ^ base.items()) <= 2, "one thing differs"


def test_no_two_rows_share_a_name() -> None:
    from attn_reg_plugin.bench.rows import all_rows
    from attn_reg_plugin.experiments.methods import BASELINES

    presets = [preset.name for method in REGISTRY.values() for preset in presets_of(method)]
    names = [*(method.name for method in BASELINES), *presets]
    assert len(set(names)) == len(names)
    rows = [row.name for row in all_rows()]
    assert len(set(rows)) == len(rows)


def test_a_row_called_as_a_method_is_that_method() -> None:
    rows = known_methods()
    assert set(REGISTRY) <= set(rows)
    assert all(row.regularizer == row.name for row in rows.values() if row.name in REGISTRY)
    earlier = [name for row in rows.values() for name in row.earlier]
    assert len(set(earlier)) == len(earlier)


def test_earlier_names_are_understood_where_they_mean_one_thing() -> None:
    weights, own, method = select_methods(["weights_dropout", "attention_dropout_0.2", "attention_dropout"])
    assert (weights.name, weights.flags) == ("weights_dropout", method.flags) and method.regularizer == method.name
    assert (own.name, own.flags) == ("attention_dropout_0.2", known_methods()["own_attention_dropout_0.2"].flags)
    (method,) = select_methods({"attention_dropout": {"p": 0.3, "flags": "--attention-dropout 0"}})
    assert method.flags[-2:] == ("--attention-dropout", "0")


OWN = "drop encoder.self: 0:0.6 1000:0.1"
OWN_FLAG = f"--scheduled-dropout-schedule='{OWN}'"
TOGETHER = "r_drop+scheduled_dropout"


@pytest.mark.parametrize(
    ("wanted", "overrides"),
    [
        ({"scheduled_dropout": {"schedule": OWN}}, []),
        ({"mine": {"like": TOGETHER, "scheduled_dropout_schedule": OWN}}, []),
        ({"mine": {"like": TOGETHER, "flags": OWN_FLAG}}, []),
        ("scheduled_dropout", [f"scheduled_dropout={OWN_FLAG}"]),
        ([TOGETHER], [f"{TOGETHER}={OWN_FLAG}"]),
        ({"mine": {"like": TOGETHER, "sites": "*", "flags": "--lr 1"}}, [f"mine={OWN_FLAG}"]),
    ],
)
def test_a_schedule_of_ones_own_counts_updates_as_it_always_did(wanted: Any, overrides: list) -> None:
    (method,) = select_methods(wanted, overrides)
    words = [part for word in method.flags for part in word.split("=")]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert "--scheduled-dropout-unit" not in words and words.count("--scheduled-dropout-schedule") == 1
    assert given["--scheduled-dropout-schedule"] == OWN and given["--attn-reg"] == method.regularizer
    if "mine" in wanted:
        assert given["--r-drop-weight"] == "1.0" and ("--lr" in given) == bool(overrides)


def test_a_unit_of_ones_own_stays() -> None:
    given = {"scheduled_dropout_unit": "epoch", "scheduled_dropout_schedule": "drop encoder.self: 1:0.6 9:0.1"}
    (method,) = select_methods({TOGETHER: given}, [f"{TOGETHER}={OWN_FLAG}"])
    assert method.flags[method.flags.index("--scheduled-dropout-unit") + 1] == "epoch"
    (method,) = select_methods({"mine": {"like": "scheduled_dropout", "sites": "*"}})
    assert dict(method.options) == {**known_methods()["scheduled_dropout"].options, "sites": "*"}


@pytest.mark.parametrize(
    ("wanted", "overrides"),
    [
        ({"attention_dropout": {"flags": "--attention-dropout 0.15"}}, []),
        ({"mild": {"like": "attention_dropout", "title": "t", "flags": "--attention-dropout=0.15"}}, []),
        ("attention_dropout", ["attention_dropout=--attention-dropout 0.15"]),
    ],
)
def test_a_name_that_changed_its_meaning_is_refused_with_the_earlier_ones_flag(wanted: Any, overrides: list) -> None:
    with pytest.raises(ValueError, match="sets it by --attention-dropout is called own_attention_dropout now"):
        select_methods(wanted, overrides)


@pytest.mark.parametrize("name", EARLIER)
def test_the_presets_are_what_they_were(name: str) -> None:
    assert shlex.join(known_methods()[name].flags) == shlex.join(shlex.split(EARLIER[name]))


def test_switches_and_texts() -> None:
    assert fairseq_flags("attend_out", {"normalize": True})[2:] == ["--attend-out-normalize"]
    assert fairseq_flags("attend_out", {"normalize": False})[2:] == []
    assert fairseq_flags("ad_drop", {"probe_dropout": False})[2:] == ["--ad-drop-probe-dropout", "false"]


def test_a_mapping_gives_each_its_settings() -> None:
    wanted = {
        "plain": None,
        "ad_drop": {"p": 0.6, "cross_tuning": False, "flags": "--fp16"},
        "mild": {"like": "ad_drop", "q": "0.1", "title": "a mild one"},
    }
    plain, strong, mild = select_methods(wanted, ["mild=--lr 1"])
    assert plain == known_methods()["plain"]
    assert shlex.join(strong.flags) == (
        "--attn-reg ad_drop --ad-drop-p 0.6 --ad-drop-q 0.3 --attn-sites encoder.self --ad-drop-cross-tuning off --fp16"
    )
    assert (mild.name, mild.title) == ("mild", "a mild one") and mild.flags[5:6] == ("0.1",)
    assert mild.flags[-2:] == ("--lr", "1")


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"ad_drop": {"p": 2}}, r"methods: ad_drop: p is 2, but must lie in \[0, 1\]"),
        (
            {"ad_drop": {"r": 2}},
            "methods: ad_drop: unknown setting 'r'; the settings are: like, title, flags, sites, p",
        ),
        ({"plain": {"p": 2}}, "methods: plain: unknown setting 'p'; the settings are: like, title, flags"),
        ({"ad_drop": {"p": "x"}}, "methods: ad_drop: p is 'x', but must be a number"),
        ({"ad_drop": 3}, "methods: ad_drop is 3, but must be a mapping of settings"),
        ({"mine": None}, "unknown method 'mine'; the methods are: untuned, plain"),
        ({"a/b": {"like": "plain"}}, "methods: 'a/b' isn't a name for a folder"),
        ({"plain": {"flags": "'"}}, 'methods: plain: flags "\'": a quote is not closed'),
        ({}, "--methods is empty"),
        (None, "--methods is empty"),
    ],
)
def test_settings_that_a_method_has_not(wanted: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        select_methods(wanted)


def test_flags_of_every_training_yield_to_what_a_row_asks_for_and_win_over_defaults() -> None:
    common = ["--attn-sites=*", "--ad-drop-attribution", "gradient", "--lr", "1", "--attn-reg", "none"]
    wanted = {
        "ad_drop": {},
        "own": {"like": "ad_drop", "sites": "encoder.self", "flags": "--lr 2"},
        "ad_drop_rd": {},
        "plain": {},
    }
    found = {one.name: values_of(one.among(common)) for one in select_methods(wanted)}
    names = ("--attn-reg", "--attn-sites", "--lr", "--ad-drop-attribution")
    assert [found["ad_drop"][name] for name in names] == ["ad_drop", "*", "1", "gradient"]
    assert [found["own"][name] for name in names] == ["ad_drop", "encoder.self", "2", "gradient"]
    assert [found["ad_drop_rd"][name] for name in names] == ["ad_drop", "*", "1", "random"]
    assert found["plain"]["--attn-reg"] == "none"
    common = ["--scheduled-dropout-schedule", "drop *: 0:0 9:0.1", "--attn-sites", "*"]
    (scheduled,) = select_methods("scheduled_dropout")
    found = values_of(scheduled.among(common))
    assert found["--scheduled-dropout-schedule"] == "drop *: 0:0 9:0.1" and "--scheduled-dropout-unit" not in found
    assert select_methods("ad_drop")[0].among(["--lr", "1"]) == ["--lr", "1", *select_methods("ad_drop")[0].flags]


def test_methods_that_act_together() -> None:
    named, own = select_methods(
        {"ad_drop+r_drop": None, "own": {"like": "r_drop+ad_drop", "ad_drop_p": "0.5", "sites": "*"}}
    )
    assert (named.name, named.title) == ("ad_drop+r_drop", "AD-DROP + R-Drop")
    assert shlex.join(named.flags) == (
        "--attn-reg ad_drop+r_drop --ad-drop-p 0.3 --ad-drop-q 0.3 --attn-sites encoder.self --ad-drop-cross-tuning "
        "epoch --r-drop-weight 1.0"
    )
    assert (own.value("ad_drop_p"), own.value("sites"), own.value("r_drop_weight")) == (0.5, "*", 1.0)
    assert own.flags[1] == "r_drop+ad_drop" and "--attn-sites *" in " ".join(own.flags)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("ad_drop+attend_out", "attend_out combines with no other method: it trains two copies of the model"),
        ("ad_drop+scheduled_dropout", "both choose which positions are attended, at 'encoder.self'"),
        ("r_drop+hidden_cut", "each run the batch several times"),
        ("ad_drop+plain", "plain is no regularizer, so it combines with none"),
        ("ad_drop+mine", "unknown method 'mine'; the methods are"),
        ({"ad_drop+r_drop": {"p": 1}}, "unknown setting 'p'; the settings are: like, title, flags, "),
    ],
)
def test_those_that_cannot_are_refused(wanted: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        select_methods(wanted)
