"""Romanian word forms: articles, genders, cases, adjective agreement, conjugation, doubled pronouns.

The lexicon gives the principal parts of each word (both numbers and the gender of a noun, four forms of an
adjective, the present, the participle and the third-person subjunctive of an irregular verb); the rules
here make every other form. Gender is "m", "f" or "n"; a neuter is masculine in the singular and feminine in
the plural. "Oblique" means genitive-dative as opposed to nominative-accusative.
"""

from __future__ import annotations

from dataclasses import dataclass

_VOWELS = "aăâeiîou"
_HAVE = ("am", "ai", "a", "am", "ați", "au")
_WILL = ("voi", "vei", "va", "vom", "veți", "vor")
_IS = ("sunt", "ești", "este", "suntem", "sunteți", "sunt")
_WAS = ("eram", "erai", "era", "eram", "erați", "erau")
_SHORT_CLITICS = {"îl": "l", "îi": "i", "le": "le"}
_ESC = ("esc", "ești", "ește", "im", "iți", "esc")
_EZ = ("ez", "ezi", "ează", "ăm", "ați", "ează")


@dataclass(frozen=True)
class Noun:
    """A Romanian noun: indefinite singular, indefinite plural, gender (m, f, n)."""

    singular: str
    plural: str
    gender: str


@dataclass(frozen=True)
class Adjective:
    """The four forms of a Romanian adjective."""

    masculine: str
    feminine: str
    masculine_plural: str
    feminine_plural: str


@dataclass(frozen=True)
class Verb:
    """A Romanian verb: infinitive, participle, third-person subjunctive, the six forms of the present."""

    infinitive: str
    participle: str
    subjunctive: str
    present: tuple[str, ...]
    preposition: str = ""


def noun(text: str) -> Noun:
    """A noun from ``"casă case f"``."""
    singular, plural, gender = text.split()
    return Noun(singular, plural, gender)


def adjective(text: str) -> Adjective:
    """An adjective from its four forms, or from two (``"mare mari"``) or three (``"mic mică mici"``)."""
    words = text.split()
    if len(words) == 2:
        return Adjective(words[0], words[0], words[1], words[1])
    return Adjective(words[0], words[1], words[2], words[-1])


def verb(text: str, preposition: str = "") -> Verb:
    """A verb from ``"citi citit esc"``, ``"lucra lucrat ez"`` or all its parts, for those without a rule.

    All its parts are: infinitive, participle, third-person subjunctive, then the present (six forms).
    """
    infinitive, participle, *rest = text.split()
    if rest == ["ez"]:
        stem = infinitive[:-1]
        return Verb(infinitive, participle, stem + "eze", tuple(stem + ending for ending in _EZ), preposition)
    if rest == ["esc"]:
        stem = infinitive[:-1]
        glide = "i" if stem[-1] in _VOWELS else ""
        present = tuple(stem + ("" if ending[0] == "i" else glide) + ending for ending in _ESC)
        subjunctive = stem + ("iască" if glide else "ească")
        return Verb(infinitive, participle, subjunctive, present, preposition)
    subjunctive, *forms = rest
    if len(forms) != 6:
        raise ValueError(f"The verb {infinitive!r} needs six forms of the present, not {len(forms)}.")
    return Verb(infinitive, participle, subjunctive, tuple(forms), preposition)


def is_feminine(noun: Noun, plural: bool) -> bool:
    """Whether the noun takes feminine agreement in this number (a neuter does in the plural)."""
    return noun.gender == "f" or (noun.gender == "n" and plural)


def definite(noun: Noun, plural: bool = False) -> str:
    """Nominative-accusative with the article: casa, cartea, cafeaua, băiatul, fratele; casele, băieții."""
    if plural:
        return noun.plural + ("le" if is_feminine(noun, True) else "i")
    word = noun.singular
    if noun.gender == "f":
        if word.endswith("ea"):
            return word + "ua"
        if word.endswith("ie"):
            return word[:-1] + "a"
        return word[:-1] + "a" if word.endswith("ă") else word + "a"
    if word.endswith("e"):
        return word + "le"
    return word + ("l" if word.endswith(("u", "ă")) else "ul")


def bare(noun: Noun, plural: bool = False, oblique: bool = False) -> str:
    """Without the article: casă, case; in the oblique a feminine singular looks like its plural (unei case)."""
    return noun.plural if plural or (oblique and noun.gender == "f") else noun.singular


def genitive_dative(noun: Noun, plural: bool = False) -> str:
    """Genitive-dative with the article: casei, cărții, familiei, băiatului, fratelui; caselor, băieților."""
    if plural:
        return noun.plural + "lor"
    if noun.gender == "f":
        return noun.plural[:-1] + "ei" if noun.plural.endswith("ii") else noun.plural + "i"
    word = noun.singular
    return word + ("lui" if word.endswith(("u", "e", "ă")) else "ului")


def agree(adjective: Adjective, noun: Noun, plural: bool = False, oblique: bool = False) -> str:
    """The form of the adjective beside the noun: pisica mică, băieții mici, casei mari."""
    if is_feminine(noun, plural):
        return adjective.feminine_plural if plural or oblique else adjective.feminine
    return adjective.masculine_plural if plural else adjective.masculine


def pick(forms: str, noun: Noun, plural: bool = False, oblique: bool = False) -> str:
    """:func:`agree` for a little word given by its four forms, ``"meu mea mei mele"``."""
    return agree(adjective(forms), noun, plural, oblique)


def slot(person: int, plural: bool) -> int:
    """Where a person (1, 2, 3) and a number stand among the six forms of a tense."""
    return person - 1 + 3 * plural


def subjunctive(verb: Verb, person: int, plural: bool, clitic: str = "") -> str:
    """The subjunctive: să văd, să vadă, să îl vadă."""
    form = verb.subjunctive if person == 3 else verb.present[slot(person, plural)]
    return " ".join(word for word in ("să", clitic, form) if word)


def present(verb: Verb, person: int, plural: bool, clitic: str = "") -> str:
    """The present with a doubled pronoun before it: vede, îl vede."""
    return f"{clitic} {verb.present[slot(person, plural)]}".strip()


def perfect(verb: Verb, person: int, plural: bool, clitic: str = "") -> str:
    """The perfect compus: a văzut, l-a văzut, le-a văzut, and a văzut-o with the feminine at the end."""
    have = _HAVE[slot(person, plural)]
    if clitic == "o":
        return f"{have} {verb.participle}-o"
    return f"{_SHORT_CLITICS[clitic]}-{have} {verb.participle}" if clitic else f"{have} {verb.participle}"


def future(verb: Verb, person: int, plural: bool, clitic: str = "") -> str:
    """The future with voi: va vedea, îl va vedea."""
    return f"{clitic} {_WILL[slot(person, plural)]} {verb.infinitive}".strip()


def conjugate(verb: Verb, tense: str, person: int, plural: bool, clitic: str = "") -> str:
    """The verb in the "present", "habit" (the present too), "past" or "future"."""
    make = {"past": perfect, "future": future}.get(tense, present)
    return make(verb, person, plural, clitic)


def be(tense: str, person: int, plural: bool) -> str:
    """The verb "to be": este, era (the imperfect, as descriptions want it), va fi."""
    if tense == "future":
        return f"{_WILL[slot(person, plural)]} fi"
    return (_WAS if tense == "past" else _IS)[slot(person, plural)]
