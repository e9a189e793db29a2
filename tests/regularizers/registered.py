"""The registered methods: options under which the faces try them; methods that a table leaves out have cases, too."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attn_reg_plugin.regularizers import REGISTRY
from attn_reg_plugin.regularizers.base.registry import presets_of


def besides(listed: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The methods that are not `listed`, such as a new one, with the options of each one's first preset."""
    listed = set(listed)
    assert listed <= set(REGISTRY), "what is listed is registered"
    return {name: dict(presets_of(REGISTRY[name])[0].options) for name in REGISTRY if name not in listed}


#: options of each method under which it has something to do, and under which it has nothing; None where it always has
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "ad_drop": (
        {"p": 0.5, "q": 0.5, "sites": "*", "cross_tuning": "update:3"},
        {"q": 0.0, "sites": "*", "cross_tuning": "off"},
    ),
    "attend_out": ({"steps": 4, "sites": "*", "generator_lr": 0.05}, None),
    "attention_dropout": ({"p": 0.4, "sites": "*"}, {"p": 0.0}),
    "attention_layer_drop": ({"p": 0.5, "sites": "*"}, {"p": 0.0}),
    "head_drop": ({"p": 0.5, "turn": 0.3, "end": 1, "unit": "progress", "sites": "*"}, {"p": 0.0}),
    "hidden_cut": ({"cut": 0.3}, {"cut": 0.0}),
    "layer_drop": ({"p": 0.5, "sites": "*"}, {"p": 0.0}),
    "r_drop": ({}, {"weight": 0.0}),
    "scheduled_dropout": ({"schedule": "drop *: 0:0.7 12:0", "sites": "*"}, {"schedule": "drop *: 0:0"}),
}
#: the others that are registered, such as a new method, have the options of their first presets
METHODS |= {name: (options, None) for name, options in besides(METHODS).items()}


def methods_of_readme() -> list[str]:
    """The methods that README's table has."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| `--attn-reg` |") :].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
