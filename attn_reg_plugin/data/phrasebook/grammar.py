"""One meaning, three sentences."""

from __future__ import annotations

from typing import NamedTuple

from attn_reg_plugin.data.phrasebook import speak_english, speak_romanian, speak_turkish
from attn_reg_plugin.data.phrasebook.meaning import Sentence


class Triple(NamedTuple):
    """The same sentence in English, Romanian and Turkish."""

    en: str
    ro: str
    tr: str


def realize(sentence: Sentence) -> Triple:
    """The sentence in the three languages, each with its capital and punctuation."""
    return Triple(speak_english.speak(sentence), speak_romanian.speak(sentence), speak_turkish.speak(sentence))
