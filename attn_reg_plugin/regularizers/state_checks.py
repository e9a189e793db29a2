"""Whether a mapping is what a method's `state_dict()` gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_state(state: Mapping[str, Any], name: str) -> None:
    """Refuse what is no state of a method; one made before states had their method's name is taken as it is.

    Args:
        name: of the method.

    Raises:
        TypeError: it is no mapping.
        ValueError: it is another method's state, or lacks what every state has, or counts in other than numbers.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is a {type(state).__name__}, but must be what {name}'s state_dict() gave")
    if (theirs := state.get("method", name)) != name:
        raise ValueError(f"the state is one of {theirs}, but must be one of {name}")
    if missing := [key for key in ("epoch", "updates") if key not in state]:
        raise ValueError(f"the state isn't one of {name}: it lacks {' and '.join(missing)}")
    for key, least in (("epoch", 1), ("updates", 0)):
        whole = isinstance(count := state[key], int) and not isinstance(count, bool) and count >= least
        if not whole and not (key == "epoch" and count is None):
            raise ValueError(f"the state's {key} is {count!r}, but must be a whole number, at least {least}")
