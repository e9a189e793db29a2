"""The registered methods: those that a table of a test leaves out have cases all the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attn_reg_plugin.regularizers import REGISTRY
from attn_reg_plugin.regularizers.base.registry import presets_of


def besides(listed: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The methods that are not `listed`, such as a new one, with the options of each one's first preset."""
    listed = set(listed)
    assert listed <= set(REGISTRY), "what is listed is registered"
    return {name: dict(presets_of(REGISTRY[name])[0].options) for name in REGISTRY if name not in listed}
