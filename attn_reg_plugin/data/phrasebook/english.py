"""English word forms: plurals, verb forms, articles, genitives.

Every function is pure and takes plain words. Irregular forms are not guessed here: the lexicon gives them
and these rules only fill in what is regular.
"""

from __future__ import annotations

from dataclasses import dataclass

_VOWELS = "aeiou"
_SOUNDS_LIKE_YOU = ("uni", "use", "eu", "one")


@dataclass(frozen=True)
class Noun:
    """An English noun with both of its numbers."""

    singular: str
    plural: str


@dataclass(frozen=True)
class Verb:
    """An English verb with all its forms and the preposition before its object (or an empty string)."""

    base: str
    third: str
    past: str
    gerund: str
    preposition: str = ""


def _ends_in_consonant_y(word: str) -> bool:
    return word.endswith("y") and word[-2] not in _VOWELS


def plural(word: str) -> str:
    """The regular plural: cat → cats, box → boxes, city → cities."""
    if _ends_in_consonant_y(word):
        return word[:-1] + "ies"
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    return word + "s"


def third_person(base: str) -> str:
    """The third person singular of the present: see → sees, carry → carries, go → goes."""
    if base.endswith("o"):
        return base + "es"
    return plural(base)


def past(base: str) -> str:
    """The regular past: love → loved, carry → carried, open → opened."""
    if _ends_in_consonant_y(base):
        return base[:-1] + "ied"
    return base + ("d" if base.endswith("e") else "ed")


def gerund(base: str) -> str:
    """The regular -ing form: write → writing, see → seeing, read → reading."""
    if base.endswith("e") and not base.endswith("ee"):
        return base[:-1] + "ing"
    return base + "ing"


def noun(text: str) -> Noun:
    """A noun from ``"cat"`` or, when the plural is irregular, ``"mouse mice"``."""
    words = text.split()
    return Noun(words[0], words[1] if len(words) == 2 else plural(words[0]))


def verb(text: str, preposition: str = "") -> Verb:
    """A verb from ``"open"``, ``"see saw"`` (irregular past) or ``"cut cut cutting"`` (also the gerund)."""
    words = text.split()
    base = words[0]
    return Verb(
        base,
        third_person(base),
        words[1] if len(words) > 1 else past(base),
        words[2] if len(words) > 2 else gerund(base),
        preposition,
    )


def indefinite(words: str) -> str:
    """``words`` with "a" or "an" before them, by their first sound: an old house, a university."""
    vowel = words[0].lower() in _VOWELS and not words.lower().startswith(_SOUNDS_LIKE_YOU)
    return f"{'an' if vowel else 'a'} {words}"


def genitive(words: str, plural: bool = False) -> str:
    """The genitive: the doctor's, the actress's, the children's, the students'."""
    return words + ("'" if plural and words.endswith("s") else "'s")


def be(person: int, plural: bool, past: bool = False) -> str:
    """The form of "to be" for a person (1, 2, 3) and a number, in the present or the past."""
    many = plural or person == 2
    if past:
        return "were" if many else "was"
    if many:
        return "are"
    return "am" if person == 1 else "is"
