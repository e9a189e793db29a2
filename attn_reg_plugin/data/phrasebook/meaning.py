"""What a sentence means, before any language: phrases, clauses, sentences.

Nothing here knows a word order, a case or an ending; ``speak_english``, ``speak_romanian`` and
``speak_turkish`` each turn one meaning into one sentence. Tenses are "present", "habit" (with "every
day"), "past", "future"; modals are "", "want", "must", "can".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from attn_reg_plugin.data.phrasebook.entries import Adjective, Motion, Name, Noun, Quantity, Time, Verb


@dataclass(frozen=True)
class Pronoun:
    """A subject pronoun: I, you (one person), we, they; or the question word who."""

    key: str
    person: int
    plural: bool


I = Pronoun("I", 1, False)  # noqa: E741
YOU = Pronoun("you", 2, False)
WE = Pronoun("we", 1, True)
THEY = Pronoun("they", 3, True)
WHO = Pronoun("who", 3, False)


@dataclass(frozen=True)
class Phrase:
    """A noun with its company.

    ``determiner`` is "the", "a", "this", "every", "no", "bare" (milk), "quantity", "my", "your", "our", or
    "of" when there is a possessor. ``relative`` is "who (verb)ed the (object)".
    """

    noun: Noun
    determiner: str = "the"
    plural: bool = False
    adjective: Adjective | None = None
    quantity: Quantity | None = None
    possessor: Actor | None = None
    relative: Relative | None = None

    @property
    def definite(self) -> bool:
        """Whether it names something known, which Turkish and Romanian objects show."""
        return self.determiner in ("the", "this", "my", "your", "our", "of")

    @property
    def personal(self) -> bool:
        """Whether it names a human being."""
        return not self.noun.tags.isdisjoint(("person", "kin"))


@dataclass(frozen=True)
class Relative:
    """The relative clause "who verb-ed the object", always in the past."""

    verb: Verb
    object: Phrase


Actor = Phrase | Name | Pronoun


@dataclass(frozen=True)
class Place:
    """A place and how something stands to it: "" (its own in/at/on), on, under, behind, front, near."""

    phrase: Phrase
    relation: str = ""


@dataclass(frozen=True)
class Clause:
    """Somebody does something: the subject, the verb, all that goes with it."""

    subject: Actor
    verb: Verb
    tense: str = "past"
    object: Phrase | Name | None = None
    recipient: Phrase | Name | None = None
    beneficiary: Phrase | Name | None = None
    companion: Phrase | Name | None = None
    place: Place | None = None
    motion: Motion | None = None
    means: Noun | None = None
    time: Time | None = None
    negative: bool = False
    modal: str = ""


@dataclass(frozen=True)
class State:
    """Somebody or something is so, or more so than a standard."""

    subject: Actor
    adjective: Adjective
    tense: str = "present"
    negative: bool = False
    standard: Phrase | Name | None = None


@dataclass(frozen=True)
class Location:
    """Somebody or something is somewhere."""

    subject: Actor
    place: Place
    tense: str = "present"
    negative: bool = False


@dataclass(frozen=True)
class Existence:
    """There is (or was) something somewhere; there is none when the determiner is "no"."""

    phrase: Phrase
    place: Place
    tense: str = "present"


Clausal = Clause | State | Location | Existence


@dataclass(frozen=True)
class Plain:
    """One clause, stated or asked (yes or no; also "who did ...?", whose subject is WHO)."""

    clause: Clausal
    asks: bool = False


@dataclass(frozen=True)
class Wh:
    """A question with where, when or why."""

    word: str
    clause: Clause


@dataclass(frozen=True)
class Report:
    """Somebody knows, says, thinks, hears or hopes that something is so."""

    subject: Actor
    verb: Verb
    tense: str
    clause: Clause


@dataclass(frozen=True)
class Joined:
    """Two clauses with "and", "but" or "because"; ``shared`` when both have the first one's subject."""

    first: Clausal
    conjunction: str
    second: Clause
    shared: bool = False


@dataclass(frozen=True)
class When:
    """When the first happened, the second did; both in the past."""

    first: Clause
    second: Clause


Sentence = Plain | Wh | Report | Joined | When


_PARTS = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (Phrase, Relative, Place, Clause, State, Location, Existence, Plain, Wh, Report, Joined, When)
}


def walk(node: object) -> Iterator[object]:
    """Every part of a meaning, the whole first; lexical entries are leaves."""
    yield node
    for name in _PARTS.get(type(node), ()):
        part = getattr(node, name)
        if part:
            yield from walk(part)


def lexemes(sentence: Sentence) -> frozenset[str]:
    """The lexical entries of a sentence, each as "Kind:key"."""
    leaves = (Noun, Name, Adjective, Verb, Time, Quantity)
    return frozenset(f"{type(part).__name__}:{part.key}" for part in walk(sentence) if isinstance(part, leaves))


def combinations(sentence: Sentence) -> frozenset[tuple[str, str, str]]:
    """The verb–object and adjective–noun pairs of a sentence: ("verb-object", "open", "door")."""
    found = set()
    for part in walk(sentence):
        if isinstance(part, (Clause, Relative)) and isinstance(part.object, Phrase):
            found.add(("verb-object", part.verb.key, part.object.noun.key))
        elif isinstance(part, Phrase) and part.adjective:
            found.add(("adjective-noun", part.adjective.key, part.noun.key))
        elif isinstance(part, State) and isinstance(part.subject, Phrase):
            found.add(("adjective-noun", part.adjective.key, part.subject.noun.key))
    return frozenset(found)
