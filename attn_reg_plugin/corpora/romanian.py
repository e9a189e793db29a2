"""Romanian letters: cedilla to comma below, and the removal of diacritics.

Romanian ș and ț have a comma below (U+0219, U+021B). Much text has them with a cedilla (U+015F, U+0163),
which is another letter to a model and to BLEU. The rules here touch the five Romanian letters only (ă, â, î,
ș, ț, either case, composed or written with a combining mark); every other letter stays as it is.
"""

from __future__ import annotations

import re

#: what `--romanian` may be
RULES = ("cedilla", "no-diacritics", "none")
#: the rule after which no text can be compared with one that has diacritics
STRIPPED = "no-diacritics"

_CEDILLA = str.maketrans("şţŞŢ", "șțȘȚ")
_COMBINING_CEDILLA = re.compile("([sStT])\u0327")
_PLAIN = str.maketrans("ăâîșțĂÂÎȘȚ", "aaistAAIST")
_COMBINING = re.compile("([aA])[\u0306\u0302]|([iI])\u0302|([sStT])\u0326")
_COMMA = {"s": "ș", "t": "ț", "S": "Ș", "T": "Ț"}


def normalize(line: str, rule: str) -> str:
    """Romanian text under a rule; applying a rule twice is the same as once.

    Args:
        line: any text.
        rule: `cedilla` writes ş ţ as ș ț; `no-diacritics` does so and then writes a a i s t for ă â î ș ț;
            `none` changes nothing.

    Raises:
        ValueError: another rule.
    """
    if rule == "none":
        return line
    if rule not in RULES:
        raise ValueError(f"Romanian rule {rule!r}: it must be one of {', '.join(RULES)}")
    line = line.translate(_CEDILLA)
    line = _COMBINING_CEDILLA.sub(lambda match: _COMMA[match[1]], line)
    if rule == STRIPPED:
        line = _COMBINING.sub(lambda match: match[1] or match[2] or match[3], line.translate(_PLAIN))
    return line
