"""What a lexical entry is: one meaning with its words in the three languages.

Entries carry tags. A noun's tags say what it is ("animal", "openable"); a verb's and an adjective's say
which nouns they go with. So the phrasebook has no cat that reads a newspaper.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_reg_plugin.data.phrasebook import english, romanian, turkish


@dataclass(frozen=True, eq=False)
class Noun:
    """A noun in three languages. ``prepositions`` (English, Romanian) only for places: in/în, at/la, on/pe."""

    key: str
    english: english.Noun
    romanian: romanian.Noun
    turkish: turkish.Stem
    tags: frozenset[str]
    prepositions: tuple[str, str] = ("", "")


@dataclass(frozen=True, eq=False)
class Name:
    """A person's name, the same in the three languages."""

    key: str
    feminine: bool
    turkish: turkish.Stem
    tags: frozenset[str] = frozenset({"person"})


@dataclass(frozen=True, eq=False)
class Adjective:
    """An adjective. An empty comparative means that it is not compared."""

    key: str
    english: str
    comparative: str
    romanian: romanian.Adjective
    turkish: str
    goes_with: frozenset[str]


@dataclass(frozen=True, eq=False)
class Verb:
    """A verb; what may be its subject, object and place; and what its templates need to know.

    ``flags``: "stative" (English uses the simple present), "event" (no present), "present" (only the
    present), "timeless" (no adverb of time), "specific" (a Turkish indefinite object is accusative too),
    "benefit" (takes "for somebody"), "unowned" (its object is nobody's yet), "past" (reports in the past).
    """

    key: str
    english: english.Verb
    romanian: romanian.Verb
    turkish: turkish.Verb
    subjects: frozenset[str]
    objects: frozenset[str]
    places: frozenset[str]
    flags: frozenset[str]


@dataclass(frozen=True, eq=False)
class Motion:
    """How a verb of motion joins its place: English preposition, Romanian source or not, Turkish case.

    ``english`` is "to", "from", "" (leave the city) or "at" for the place's own preposition.
    """

    english: str
    source: bool
    turkish: str


@dataclass(frozen=True, eq=False)
class Time:
    """An adverb of time and the tenses it goes with."""

    key: str
    english: str
    romanian: str
    turkish: str
    tenses: frozenset[str]


@dataclass(frozen=True, eq=False)
class Quantity:
    """A number from two up, or "many"; the nouns after it are plural, except in Turkish."""

    key: str
    english: str
    romanian: romanian.Adjective
    turkish: str


def noun(text: str, romanian_text: str, turkish_text: str, tags: str, *, front: bool = False) -> Noun:
    """A noun from its words, as :func:`english.noun` and its sisters read them, and its tags.

    A place has one of the tags "in", "at", "on", which chooses its prepositions.
    """
    words = frozenset(tags.split())
    pairs = {"in": ("in", "în"), "at": ("at", "la"), "on": ("on", "pe")}
    prepositions = next((pair for tag, pair in pairs.items() if tag in words), ("", ""))
    english_noun = english.noun(text)
    return Noun(
        english_noun.singular,
        english_noun,
        romanian.noun(romanian_text),
        turkish.noun(turkish_text, front),
        words,
        prepositions,
    )


def adjective(text: str, romanian_text: str, turkish_text: str, goes_with: str, sense: str = "") -> Adjective:
    """An adjective from ``"big bigger"``, ``"polite more"`` or ``"red"``; ``sense`` parts homonyms."""
    base, _, comparative = text.partition(" ")
    return Adjective(
        base + sense,
        base,
        f"more {base}" if comparative == "more" else comparative,
        romanian.adjective(romanian_text),
        turkish_text,
        frozenset(goes_with.split()),
    )


def verb(
    words: tuple[str, str, str],
    objects: str = "",
    *,
    subjects: str = "person kin",
    places: str = "",
    flags: str = "",
    prepositions: tuple[str, str] = ("", ""),
    case: str = "accusative",
) -> Verb:
    """A verb from its words in English, Romanian and Turkish, and what governs its object."""
    english_verb = english.verb(words[0], prepositions[0])
    return Verb(
        english_verb.base,
        english_verb,
        romanian.verb(words[1], prepositions[1]),
        turkish.verb(words[2], case),
        frozenset(subjects.split()),
        frozenset(objects.split()),
        frozenset(places.split()),
        frozenset(flags.split()),
    )
