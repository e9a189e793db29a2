"""The methods of comparisons: their flags from the registry, and settings of their own in a configuration."""

import pytest

from attn_reg_plugin.experiments.methods import BASELINES, Method, known_methods, select_methods
from attn_reg_plugin.experiments.running.flags import parsed, words_of
from attn_reg_plugin.regularizers.base import REGISTRY
from attn_reg_plugin.regularizers.base.registry import presets_of

#: the papers' ablations and rivals, and flags that they have
NAMED = {
    "untuned": "--attn-reg none --max-update 1",
    "plain": "--attn-reg none",
    "own_attention_dropout": "--attn-reg none --attention-dropout 0.3",
    "ad_drop": "--attn-reg ad_drop --ad-drop-p 0.3 --ad-drop-q 0.3 --attn-sites encoder.self "
    "--ad-drop-cross-tuning epoch",
    "ad_drop_ga": "--ad-drop-attribution gradient",
    "ad_drop_iga": "--ad-drop-attribution integrated",
    "ad_drop_aa": "--ad-drop-attribution attention",
    "ad_drop_rd": "--ad-drop-attribution random",
    "ad_drop_gold": "--ad-drop-labels gold",
    "ad_drop_low": "--ad-drop-direction low",
    "ad_drop_first_layer": "--attn-sites 'encoder.self[0]'",
    "ad_drop_without_cross_tuning": "--ad-drop-cross-tuning off",
    "attend_out": "--attn-reg attend_out --attn-sites encoder.self",
    "scores_dropout_0.2": "--attn-reg attention_dropout --attention-dropout-where scores --attention-dropout-p 0.2",
    "attention_dropout": "--attn-reg attention_dropout --attention-dropout-where weights --attention-dropout-p 0.1",
    "layer_drop": "--attn-reg layer_drop --layer-drop-p 0.2",
    "head_drop": "--attn-reg head_drop --head-drop-p 0.2",
    "head_drop_v": "--head-drop-p 0.2 --head-drop-unit progress --head-drop-turn 0.3 --head-drop-end 1.0",
    "scheduled_dropout": "--attn-reg scheduled_dropout --scheduled-dropout-unit progress "
    "--scheduled-dropout-schedule 'drop encoder.self: 0:0.6 1:0.55..0.11'",
    "attention_layer_drop": "--attn-reg attention_layer_drop --attn-sites encoder.self --attention-layer-drop-p 0.2",
}


def flags_of(method: Method) -> dict[str, str]:
    return {name: str(value) for name, value in method.flags.items()}


@pytest.mark.parametrize("name", NAMED)
def test_the_papers_rows_have_names(name: str) -> None:
    method, table = known_methods()[name], known_methods()
    assert parsed("", NAMED[name]).items() <= flags_of(method).items() and method.title == name
    if method.regularizer == "ad_drop":
        assert len(flags_of(method).items() ^ flags_of(table["ad_drop"]).items()) <= 2, "one thing differs"


def test_no_two_rows_share_a_name_and_a_method_has_its_own() -> None:
    presets = [preset.name for method in REGISTRY.values() for preset in presets_of(method)]
    names = [*(method.name for method in BASELINES), *presets]
    rows = known_methods()
    assert len(set(names)) == len(names) and set(REGISTRY) <= set(rows)
    assert all(row.regularizer == row.name for row in rows.values() if row.name in REGISTRY)


def test_switches_and_texts() -> None:
    for name, setting, words in (
        ("attend_out", {"normalize": True}, ["--attend-out-normalize"]),
        ("attend_out", {"normalize": False}, []),
        ("ad_drop", {"probe_dropout": False}, ["--ad-drop-probe-dropout", "false"]),
    ):
        (plain,), (method,) = select_methods(name), select_methods({name: setting})
        assert words_of(method.flags) == [*words_of(plain.flags), *words]


def test_a_mapping_gives_each_its_settings() -> None:
    wanted = {
        "plain": None,
        "ad_drop": {"p": 0.6, "cross_tuning": False, "flags": "--fp16"},
        "mild": {"like": "ad_drop", "q": "0.1", "title": "a mild one"},
    }
    plain, strong, mild = select_methods(wanted, ["mild=--lr 1 --attn-sites 'a b'"])
    assert plain == known_methods()["plain"]
    words = "--attn-reg ad_drop --ad-drop-p 0.6 --ad-drop-q 0.3 --attn-sites encoder.self --ad-drop-cross-tuning off"
    assert words_of(strong.flags) == [*words.split(), "--fp16"]
    assert (mild.name, mild.title, mild.value("q"), mild.value("p")) == ("mild", "a mild one", 0.1, 0.3)
    assert (mild.flags["lr"], mild.flags["attn-sites"]) == ("1", "a b")


@pytest.mark.parametrize(
    ("wanted", "overrides", "said"),
    [
        ({"ad_drop": {"p": 2}}, [], r"methods: ad_drop: p is 2, but must lie in \[0, 1\]"),
        ({"ad_drop": {"r": 2}}, [], "ad_drop: unknown setting 'r'; the settings are: like, title, flags, sites, unit"),
        ({"ad_drop": {"p": "x"}}, [], "methods: ad_drop: p is 'x', but must be a number"),
        (
            {"scheduled_dropout": {"schedule": "drop *: 0:1 9:0"}},
            [],
            "a point at 9, but unit is progress, which ends at 1",
        ),
        ({"ad_drop": 3}, [], "methods: ad_drop is 3, but must be a mapping of settings"),
        ({"mine": None}, [], "unknown method 'mine'; the methods are: untuned, plain"),
        ({"a/b": {"like": "plain"}}, [], "methods: 'a/b' isn't a name for a folder"),
        ({"_a": {"like": "plain"}}, [], "methods: '_a' isn't a name for a folder: a letter or digit"),
        ({"a": {"like": "untuned"}}, [], "a is like untuned, which has no other name; give it a `title`"),
        ({"plain": {"flags": "'"}}, [], 'methods: plain: flags "\'": a quote is not closed'),
        (None, [], "--methods is empty"),
        (3, [], "methods is 3, but must be names with commas, or a mapping of each to its settings"),
        (["plain"], ["plain=--ad-drop-p 7"], "methods: plain has --ad-drop-p, which is of ad_drop"),
        (["plain", "plain"], [], "names a method twice"),
        (
            {"a": {"like": "plain", "title": "b"}, "b": {"like": "plain"}},
            [],
            "methods: a and b have the same title, 'b'",
        ),
        (["plain"], ["ad_drop=--x"], "which is not among --methods plain"),
        (["plain"], ["plain"], "wants NAME=FLAGS, given 'plain'"),
        ("r_drop+hidden_cut", [], "each run the batch several times"),
        ("ad_drop+plain", [], "plain is no regularizer, so it combines with none"),
        ({"ad_drop+r_drop": {"p": 1}}, [], "unknown setting 'p'; the settings are: like, title, flags, "),
    ],
)
def test_methods_that_are_refused(wanted: object, overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        select_methods(wanted, overrides)


def test_flags_of_every_training_yield_to_what_a_row_asks_for_and_win_over_defaults() -> None:
    common = parsed("", "--attn-sites=* --ad-drop-attribution gradient --lr 1 --attn-reg none")
    wanted = {
        "ad_drop": {},
        "own": {"like": "ad_drop", "sites": "encoder.self", "flags": "--lr 2"},
        "ad_drop_rd": {},
        "plain": {},
    }
    found = {one.name: one.among(common) for one in select_methods(wanted)}
    names = ("attn-reg", "attn-sites", "lr", "ad-drop-attribution")
    assert [found["ad_drop"][name] for name in names] == ["ad_drop", "*", "1", "gradient"]
    assert [found["own"][name] for name in names] == ["ad_drop", "encoder.self", "2", "gradient"]
    assert [found["ad_drop_rd"][name] for name in names] == ["ad_drop", "*", "1", "random"]
    assert found["plain"]["attn-reg"] == "none"


def test_methods_that_act_together() -> None:
    own = {"like": "r_drop+ad_drop", "ad_drop_p": "0.5", "sites": "*"}
    named, own = select_methods({"ad_drop+r_drop": None, "own": own})
    words = "--attn-reg ad_drop+r_drop --ad-drop-p 0.3 --ad-drop-q 0.3 --attn-sites encoder.self --ad-drop-cross-tuning"
    assert words_of(named.flags) == [*words.split(), "epoch", "--r-drop-weight", "1.0"]
    assert (own.value("ad_drop_p"), own.value("sites"), own.value("r_drop_weight")) == (0.5, "*", 1.0)
    assert (own.flags["attn-reg"], own.flags["attn-sites"], own.title) == ("r_drop+ad_drop", "*", "own")
