"""Turkish word forms: vowel harmony, softening, buffer letters, cases, possessives, tenses, questions.

A nominal is a :class:`Stem` and every noun suffix returns a new one, so that suffixes chain as they do in
the language: ``locative(possessive(plural(ev), 1))`` is evlerimde. Four-way harmony gives ı, i, u, ü and
two-way harmony a, e. Persons are 1, 2, 3 and a number, as in the other two languages.
"""

from __future__ import annotations

from dataclasses import dataclass

_FOUR_WAY = {"a": "ı", "â": "ı", "ı": "ı", "e": "i", "i": "i", "o": "u", "u": "u", "ö": "ü", "ü": "ü"}
_FRONTED = {"ı": "i", "u": "ü", "i": "i", "ü": "ü"}
_VOICELESS = "fstkçşhp"


@dataclass(frozen=True)
class Stem:
    """A Turkish nominal that may still take suffixes.

    ``soft`` is what stands before a vowel when that is not ``form`` itself (kitap, kitab-; su, suy-),
    ``front`` marks words whose suffixes are front in spite of their last vowel (saat), ``pronominal`` those
    that take n before a case (after the third-person possessive), ``proper`` names, with their apostrophe.
    """

    form: str
    soft: str = ""
    front: bool = False
    pronominal: bool = False
    proper: bool = False


@dataclass(frozen=True)
class Verb:
    """A Turkish verb stem, what it becomes before a vowel (git, gid-; ye, yi-) and the case of its object."""

    stem: str
    soft: str
    case: str = "accusative"


def noun(text: str, front: bool = False) -> Stem:
    """A noun from ``"ev"`` or ``"kitap/kitab"``."""
    form, _, soft = text.partition("/")
    return Stem(form, soft, front)


def verb(text: str, case: str = "accusative") -> Verb:
    """A verb from ``"gör"`` or ``"git/gid"``."""
    stem, _, soft = text.partition("/")
    return Verb(stem, soft or stem, case)


def is_vowel(letter: str) -> bool:
    """Whether the letter is a Turkish vowel."""
    return letter.lower() in _FOUR_WAY


def four_way(word: str, front: bool = False) -> str:
    """The high vowel (ı, i, u, ü) that harmonizes with the last vowel of ``word``."""
    vowel = next(_FOUR_WAY[letter] for letter in reversed(word.lower()) if letter in _FOUR_WAY)
    return _FRONTED[vowel] if front else vowel


def two_way(word: str, front: bool = False) -> str:
    """The low vowel (a, e) that harmonizes with the last vowel of ``word``."""
    return "e" if four_way(word, front) in "iü" else "a"


def attach(word: str, suffix: str, front: bool = False) -> str:
    """``word`` with a suffix whose capitals harmonize: I is ı i u ü, A is a e, D is d or t.

    No buffer letter and no softening happen here: the callers choose the stem and the suffix.
    """
    for letter in suffix:
        if letter == "I":
            letter = four_way(word, front)
        elif letter == "A":
            letter = two_way(word, front)
        elif letter == "D":
            letter = "t" if word[-1] in _VOICELESS else "d"
        if is_vowel(letter):
            front = False
        word += letter
    return word


def _inflect(stem: Stem, after_vowel: str, after_consonant: str, pronominal: bool = False) -> Stem:
    """Put on the suffix that fits the end of the stem; a soft stem counts as ending in a consonant."""
    vowel_final = is_vowel(stem.form[-1]) and not stem.soft
    suffix = after_vowel if vowel_final else after_consonant
    base = stem.soft if stem.soft and suffix[:1] in ("I", "A") else stem.form
    if stem.proper:
        tail = attach(base, suffix, stem.front)[len(base) :]
        return Stem(f"{base}'{tail}", pronominal=pronominal)
    return Stem(attach(base, suffix, stem.front), pronominal=pronominal)


def plural(stem: Stem) -> Stem:
    """evler, kitaplar, saatler."""
    return _inflect(stem, "lAr", "lAr")


def accusative(stem: Stem) -> Stem:
    """evi, kitabı, arabayı, arabasını, Ana'yı."""
    return _inflect(stem, "nI" if stem.pronominal else "yI", "I")


def dative(stem: Stem) -> Stem:
    """eve, kitaba, arabaya, arabasına."""
    return _inflect(stem, "nA" if stem.pronominal else "yA", "A")


def locative(stem: Stem) -> Stem:
    """evde, kitapta, arabada, arabasında."""
    return _inflect(stem, "nDA" if stem.pronominal else "DA", "DA")


def ablative(stem: Stem) -> Stem:
    """evden, kitaptan, arabadan, arabasından."""
    return _inflect(stem, "nDAn" if stem.pronominal else "DAn", "DAn")


def genitive(stem: Stem) -> Stem:
    """evin, kitabın, arabanın, suyun."""
    return _inflect(stem, "nIn", "In")


def instrumental(stem: Stem) -> Stem:
    """evle, arabayla, arabasıyla, suyla (the postposition ile, written together)."""
    return _inflect(stem, "ylA", "ylA" if is_vowel(stem.form[-1]) else "lA")


def nominative(stem: Stem) -> Stem:
    """The stem as it is; here so that every case has a function."""
    return stem


CASES = {
    "nominative": nominative,
    "accusative": accusative,
    "dative": dative,
    "locative": locative,
    "ablative": ablative,
    "genitive": genitive,
    "instrumental": instrumental,
}


def possessive(stem: Stem, person: int, plural: bool = False) -> Stem:
    """evim, evin, evi, evimiz, eviniz, evleri; arabam, arabası. The third person takes n before a case."""
    after_vowel, after_consonant = (
        ("m", "Im"),
        ("n", "In"),
        ("sI", "I"),
        ("mIz", "ImIz"),
        ("nIz", "InIz"),
        ("lArI", "lArI"),
    )[person - 1 + 3 * plural]
    return _inflect(stem, after_vowel, after_consonant, pronominal=person == 3)


def _predicate_suffix(word: str, person: int, plural: bool) -> str:
    """The personal ending of a predicate, with y after a vowel: yorgunum, hastayım."""
    suffix = ("Im", "sIn", "", "Iz", "sInIz", "lAr")[person - 1 + 3 * plural]
    return "y" + suffix if suffix[:1] == "I" and is_vowel(word[-1]) else suffix


def with_person(word: str, person: int, plural: bool) -> str:
    """The personal ending on a predicate in the present: yorgunum, hastasın, gidiyoruz, gideceğim."""
    suffix = _predicate_suffix(word, person, plural)
    if suffix[:1] == "I" and word.endswith(("acak", "ecek")):
        word = word[:-1] + "ğ"
    return attach(word, suffix)


def past_with_person(word: str, person: int, plural: bool) -> str:
    """The past of a predicate that is no verb: yorgundum, hastaydı, büyüktü, bahçedeydik."""
    suffix = ("DIm", "DIn", "DI", "DIk", "DInIz", "DIlAr")[person - 1 + 3 * plural]
    return attach(word, ("y" if is_vowel(word[-1]) else "") + suffix)


def question(word: str, person: int = 3, plural: bool = False, past: bool = False) -> str:
    """A predicate with the question particle, which carries the person: gidiyor musun, yorgun muydu.

    The third person plural keeps its ending on the predicate, as in gidiyorlar mı.
    """
    if person == 3 and plural and not past:
        return question(with_person(word, 3, True))
    particle = "m" + four_way(word)
    ending = past_with_person if past else with_person
    return f"{word} {ending(particle, person, plural)}"


def _before_vowel(verb: Verb, negative: bool) -> str:
    """What stands before a suffix that starts with a vowel, with its buffer y: gid, bekley, gitmey."""
    stem = attach(verb.stem, "mA") if negative else verb.soft
    return stem + "y" if is_vowel(stem[-1]) else stem


def _before_consonant(verb: Verb, negative: bool) -> str:
    return attach(verb.stem, "mA") if negative else verb.stem


def progressive_stem(verb: Verb, negative: bool = False) -> str:
    """The third person of -iyor: gidiyor, bekliyor, okuyor, yiyor; gitmiyor, beklemiyor."""
    if negative:
        return attach(verb.stem, "mIyor")
    stem = verb.soft
    if not is_vowel(stem[-1]):
        return attach(stem, "Iyor")
    shorter = stem[:-1]
    source = shorter if any(is_vowel(letter) for letter in shorter) else stem
    return shorter + four_way(source) + "yor"


def future_stem(verb: Verb, negative: bool = False) -> str:
    """The third person of -ecek: gidecek, bekleyecek, yiyecek, gitmeyecek."""
    return attach(_before_vowel(verb, negative), "AcAk")


def necessity_stem(verb: Verb, negative: bool = False) -> str:
    """The third person of -meli: gitmeli, okumalı, gitmemeli."""
    return attach(_before_consonant(verb, negative), "mAlI")


def ability_stem(verb: Verb) -> str:
    """The third person of -ebilir: gidebilir, okuyabilir."""
    return attach(_before_vowel(verb, False), "Abilir")


def inability(verb: Verb, person: int, plural: bool) -> str:
    """The negative of -ebilir: gidemem, gidemezsin, gidemez, gidemeyiz, gidemezler."""
    stem = attach(_before_vowel(verb, False), "AmA")
    return attach(stem, ("m", "zsIn", "z", "yIz", "zsInIz", "zlAr")[person - 1 + 3 * plural])


def past(verb: Verb, person: int, plural: bool, negative: bool = False) -> str:
    """The past in -di: gittim, gitti, aldık, gitmedi."""
    suffix = ("DIm", "DIn", "DI", "DIk", "DInIz", "DIlAr")[person - 1 + 3 * plural]
    return attach(_before_consonant(verb, negative), suffix)


def infinitive(verb: Verb) -> str:
    """gitmek, okumak."""
    return attach(verb.stem, "mAk")


def subject_participle(verb: Verb, negative: bool = False) -> str:
    """The participle of "who does": giden, bekleyen, yiyen, gitmeyen."""
    return attach(_before_vowel(verb, negative), "An")


def clause_noun(verb: Verb, tense: str, person: int, plural: bool, negative: bool = False) -> Stem:
    """A clause made a noun, "that somebody did" (or "will do"): geldiği, geldiğim, gelecekleri."""
    future = tense == "future"
    word = future_stem(verb, negative) if future else attach(_before_consonant(verb, negative), "DIk")
    return possessive(Stem(word, word[:-1] + "ğ"), person, plural)


def finite(verb: Verb, tense: str, person: int, plural: bool, negative: bool = False, asks: bool = False) -> str:
    """The finite verb in the "present" (or "habit": both -iyor), "past" or "future", asked or stated."""
    if tense == "past":
        form = past(verb, person, plural, negative)
        return question(form) if asks else form
    stem = (future_stem if tense == "future" else progressive_stem)(verb, negative)
    return question(stem, person, plural) if asks else with_person(stem, person, plural)


def capitalize(text: str) -> str:
    """The text with a Turkish capital: iki becomes İki, ırmak becomes Irmak."""
    first = {"i": "İ", "ı": "I"}.get(text[0], text[0].upper())
    return first + text[1:]
