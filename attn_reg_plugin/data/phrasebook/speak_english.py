"""A meaning as an English sentence: articles, do-support, inversion, the progressive."""

from __future__ import annotations

from attn_reg_plugin.data.phrasebook import english
from attn_reg_plugin.data.phrasebook.entries import Name
from attn_reg_plugin.data.phrasebook.lexicon_verbs import WANT
from attn_reg_plugin.data.phrasebook.meaning import (
    Actor,
    Clausal,
    Clause,
    Existence,
    Joined,
    Location,
    Phrase,
    Place,
    Plain,
    Pronoun,
    Report,
    Sentence,
    Wh,
)

_RELATIONS = {"on": "on", "under": "under", "behind": "behind", "front": "in front of", "near": "near"}


def _number(actor: Actor) -> tuple[int, bool]:
    if isinstance(actor, Pronoun):
        return actor.person, actor.plural
    return 3, isinstance(actor, Phrase) and actor.plural


def phrase(actor: Actor) -> str:
    """A phrase, a name or a pronoun: the doctor's small cat, three apples, Ana, we."""
    if not isinstance(actor, Phrase):
        return actor.key
    noun = actor.noun.english.plural if actor.plural else actor.noun.english.singular
    words = f"{actor.adjective.english} {noun}" if actor.adjective else noun
    if actor.determiner == "of":
        words = f"{english.genitive(phrase(actor.possessor), _number(actor.possessor)[1])} {words}"
    elif actor.determiner == "a":
        words = english.indefinite(words)
    elif actor.determiner == "quantity":
        words = f"{actor.quantity.english} {words}"
    elif actor.determiner == "this":
        words = f"{'these' if actor.plural else 'this'} {words}"
    elif actor.determiner != "bare":
        words = f"{actor.determiner} {words}"
    if actor.relative:
        relative = actor.relative
        words += " who" if actor.personal else " that"
        words += f" {relative.verb.english.past} {_object(relative.verb.english, relative.object)}"
    return words


def _object(verb: english.Verb, actor: Phrase | Name) -> str:
    return f"{verb.preposition} {phrase(actor)}".strip()


def _place(place: Place) -> str:
    return f"{_RELATIONS.get(place.relation) or place.phrase.noun.prepositions[0]} {phrase(place.phrase)}"


def _verbs(clause: Clause, asks: bool) -> tuple[str, str]:
    """The auxiliary (or nothing) and the rest: ("did", "go"), ("is", "reading"), ("", "wants to go")."""
    person, plural = _number(clause.subject)
    verb, tail = clause.verb.english, ""
    stative = "stative" in clause.verb.flags
    if clause.modal in ("must", "can"):
        return clause.modal, verb.base
    if clause.modal == "want":
        verb, tail, stative = WANT.english, f" to {verb.base}", True
    if clause.tense == "future":
        return "will", verb.base + tail
    supported = asks or clause.negative
    if clause.tense == "past":
        return ("did", verb.base + tail) if supported else ("", verb.past + tail)
    if clause.tense == "present" and not stative:
        return english.be(person, plural), verb.gerund + tail
    third = person == 3 and not plural
    if supported:
        return "does" if third else "do", verb.base + tail
    return "", (verb.third if third else verb.base) + tail


def _complements(clause: Clause) -> str:
    verb = clause.verb.english
    words = []
    if clause.object:
        words.append(_object(verb, clause.object))
    if clause.recipient:
        words.append(f"to {phrase(clause.recipient)}")
    if clause.beneficiary:
        words.append(f"for {phrase(clause.beneficiary)}")
    if clause.motion:
        preposition = clause.motion.english
        where = _place(clause.place) if preposition == "at" else f"{preposition} {phrase(clause.place.phrase)}"
        words.append(where.strip())
    elif clause.place:
        words.append(_place(clause.place))
    if clause.companion:
        words.append(f"with {phrase(clause.companion)}")
    if clause.means:
        words.append(f"by {clause.means.english.singular}")
    if clause.time:
        words.append(clause.time.english)
    return " ".join(words)


def _assemble(subject: str, auxiliary: str, rest: str, asks: bool, negative: bool) -> str:
    """Subject, auxiliary and the rest in the order of a statement or a question."""
    if asks and auxiliary:
        return f"{auxiliary} {subject} {'not ' if negative else ''}{rest}"
    if negative:
        auxiliary = "cannot" if auxiliary == "can" else f"{auxiliary} not"
    return " ".join(word for word in (subject, auxiliary, rest) if word)


def clause(meaning: Clausal, asks: bool = False, with_subject: bool = True) -> str:
    """A clause, stated or asked, without capital and full stop."""
    if isinstance(meaning, Existence):
        be = english.be(3, meaning.phrase.plural, meaning.tense == "past")
        what = f"{phrase(meaning.phrase)} {_place(meaning.place)}"
        return f"{be} there {what}" if asks else f"there {be} {what}"
    subject = phrase(meaning.subject) if with_subject else ""
    if isinstance(meaning, Clause):
        inverted = asks and subject != "who"
        auxiliary, verb = _verbs(meaning, inverted)
        rest = f"{verb} {_complements(meaning)}".strip()
        return _assemble(subject, auxiliary, rest, inverted, meaning.negative)
    if isinstance(meaning, Location):
        rest = _place(meaning.place)
    elif meaning.standard:
        rest = f"{meaning.adjective.comparative} than {phrase(meaning.standard)}"
    else:
        rest = meaning.adjective.english
    if meaning.tense == "future":
        return _assemble(subject, "will", f"be {rest}", asks, meaning.negative)
    be = english.be(*_number(meaning.subject), meaning.tense == "past")
    return _assemble(subject, be, rest, asks, meaning.negative)


def _report(sentence: Report) -> str:
    person, plural = _number(sentence.subject)
    verb = sentence.verb.english
    said = verb.third if person == 3 and not plural else verb.base
    said = verb.past if sentence.tense == "past" else said
    return f"{phrase(sentence.subject)} {said} that {clause(sentence.clause)}."


def speak(sentence: Sentence) -> str:
    """The English sentence, with its capital and its full stop or question mark."""
    if isinstance(sentence, Plain):
        text = clause(sentence.clause, sentence.asks) + ("?" if sentence.asks else ".")
    elif isinstance(sentence, Wh):
        text = f"{sentence.word} {clause(sentence.clause, asks=True)}?"
    elif isinstance(sentence, Report):
        text = _report(sentence)
    elif isinstance(sentence, Joined):
        second = clause(sentence.second, with_subject=not sentence.shared)
        comma = "," if sentence.conjunction == "but" else ""
        text = f"{clause(sentence.first)}{comma} {sentence.conjunction} {second}."
    else:
        text = f"when {clause(sentence.first)}, {clause(sentence.second)}."
    return text[0].upper() + text[1:]
