"""A meaning as a Romanian sentence: the enclitic article, doubled objects with pe, the subjunctive."""

from __future__ import annotations

from attn_reg_plugin.data.phrasebook import romanian
from attn_reg_plugin.data.phrasebook.entries import Adjective, Name
from attn_reg_plugin.data.phrasebook.lexicon_verbs import CAN, WANT
from attn_reg_plugin.data.phrasebook.meaning import (
    WE,
    YOU,
    Actor,
    Clausal,
    Clause,
    Existence,
    I,
    Joined,
    Location,
    Phrase,
    Place,
    Plain,
    Pronoun,
    Relative,
    Report,
    Sentence,
    Wh,
)

_MINE = {"my": "meu mea mei mele", "your": "tău ta tăi tale", "our": "nostru noastră noștri noastre"}
_PRONOUNS = {"I": "eu", "you": "tu", "we": "noi", "they": "ei", "who": "cine"}
_RELATIONS = {"on": "pe", "under": "sub", "near": "lângă", "behind": "în spatele", "front": "în fața"}
_FROM = {"în": "din", "la": "de la", "pe": "de pe"}
_WH = {"where": "unde", "when": "când", "why": "de ce"}
_JOIN = {"and": ", iar", "but": ", dar", "because": " pentru că"}


def _number(actor: Actor) -> tuple[int, bool]:
    if isinstance(actor, Pronoun):
        return actor.person, actor.plural
    return 3, isinstance(actor, Phrase) and actor.plural


def phrase(actor: Actor, oblique: bool = False, after_preposition: bool = False) -> str:
    """A phrase, a name or a pronoun, in the nominative-accusative or the genitive-dative.

    After a preposition a noun on its own loses its article: în grădină, but în grădina mare.
    """
    if isinstance(actor, Pronoun):
        return _PRONOUNS[actor.key]
    if isinstance(actor, Name):
        if not oblique:
            return actor.key
        return actor.key[:-1] + "ei" if actor.feminine else f"lui {actor.key}"
    words = _with_article(actor, oblique, after_preposition)
    if actor.relative:
        words += f" care {_relative(actor.relative, actor.plural)}"
    return words


def _with_article(actor: Phrase, oblique: bool, after_preposition: bool) -> str:
    noun, plural, determiner = actor.noun.romanian, actor.plural, actor.determiner
    adjective = romanian.agree(actor.adjective.romanian, noun, plural, oblique) if actor.adjective else ""
    bare = romanian.bare(noun, plural, oblique)
    articled = romanian.genitive_dative(noun, plural) if oblique else romanian.definite(noun, plural)
    if determiner == "the":
        alone = not (adjective or actor.relative)
        words = (bare if after_preposition and alone else articled, adjective)
    elif determiner == "of":
        owner = phrase(actor.possessor, oblique=True)
        link = romanian.pick("al a ai ale", noun, plural) if adjective else ""
        words = (articled, adjective, link, owner)
    elif determiner in _MINE:
        words = (articled, romanian.pick(_MINE[determiner], noun, plural, oblique), adjective)
    else:
        words = (_determiner(actor, oblique), bare, adjective)
    return " ".join(word for word in words if word)


def _determiner(actor: Phrase, oblique: bool) -> str:
    noun = actor.noun.romanian
    feminine = romanian.is_feminine(noun, actor.plural)
    if actor.determiner == "quantity":
        return romanian.agree(actor.quantity.romanian, noun, plural=True)
    if actor.determiner == "a":
        return ("unei" if feminine else "unui") if oblique else ("o" if feminine else "un")
    if actor.determiner == "this":
        if oblique:
            return "acestor" if actor.plural else ("acestei" if feminine else "acestui")
        return romanian.pick("acest această acești aceste", noun, actor.plural)
    return {"every": "fiecare", "no": "nicio" if feminine else "niciun", "bare": ""}[actor.determiner]


def _personal(actor: Phrase | Name | None) -> bool:
    """Whether a direct object takes pe and is doubled by a pronoun: a human being that is known."""
    return isinstance(actor, Name) or (isinstance(actor, Phrase) and actor.personal and actor.definite)


def _clitic(verb: romanian.Verb, thing: Phrase | Name | None, recipient: Phrase | Name | None) -> str:
    if recipient:
        return "le" if isinstance(recipient, Phrase) and recipient.plural else "îi"
    if not _personal(thing) or verb.preposition:
        return ""
    if isinstance(thing, Name):
        return "o" if thing.feminine else "îl"
    feminine = romanian.is_feminine(thing.noun.romanian, thing.plural)
    return ("le" if feminine else "îi") if thing.plural else ("o" if feminine else "îl")


def _object(verb: romanian.Verb, thing: Phrase | Name) -> str:
    if verb.preposition:  # cu, which keeps the article
        return f"{verb.preposition} {phrase(thing)}"
    return f"pe {phrase(thing, after_preposition=True)}" if _personal(thing) else phrase(thing)


def _relative(relative: Relative, plural: bool) -> str:
    verb = relative.verb.romanian
    done = romanian.perfect(verb, 3, plural, _clitic(verb, relative.object, None))
    return f"{done} {_object(verb, relative.object)}"


def _place(place: Place, source: bool = False) -> str:
    if place.relation in ("behind", "front"):
        return f"{_RELATIONS[place.relation]} {phrase(place.phrase, oblique=True)}"
    preposition = _RELATIONS.get(place.relation) or place.phrase.noun.prepositions[1]
    preposition = _FROM[preposition] if source else preposition
    words = phrase(place.phrase, after_preposition=True)
    if preposition in ("în", "din") and words.startswith(("un ", "o ")):
        preposition = "într-" if preposition == "în" else "dintr-"
        return preposition + words
    return f"{preposition} {words}"


def _verbs(clause: Clause) -> str:
    """The verb with its negation, its doubled pronoun and its modal: nu vrea să îl vadă."""
    verb, (person, plural) = clause.verb.romanian, _number(clause.subject)
    clitic = _clitic(verb, clause.object, clause.recipient)
    if clause.modal:
        modal = WANT if clause.modal == "want" else CAN
        finite = romanian.conjugate(modal.romanian, clause.tense, person, plural)
        finite = "trebuie" if clause.modal == "must" else finite
        words = f"{finite} {romanian.subjunctive(verb, person, plural, clitic)}"
    else:
        words = romanian.conjugate(verb, clause.tense, person, plural, clitic)
    return f"nu {words}" if clause.negative else words


def _complements(clause: Clause) -> str:
    words = []
    if clause.recipient:
        words.append(phrase(clause.recipient, oblique=True))
    if clause.object:
        words.append(_object(clause.verb.romanian, clause.object))
    if clause.beneficiary:
        words.append(f"pentru {phrase(clause.beneficiary, after_preposition=True)}")
    if clause.place:
        words.append(_place(clause.place, bool(clause.motion and clause.motion.source)))
    if clause.companion:
        words.append(f"cu {phrase(clause.companion)}")
    if clause.means:
        words.append(f"cu {romanian.definite(clause.means.romanian)}")
    if clause.time:
        words.append(clause.time.romanian)
    return " ".join(words)


def _subject(actor: Actor, tense: str) -> str:
    """The subject; I and you are in the verb, and so is we where the verb tells it from I."""
    if actor in (I, YOU) or (actor == WE and tense != "past"):
        return ""
    return phrase(actor)


def _agreeing(adjective: Adjective, actor: Actor) -> str:
    if isinstance(actor, Phrase):
        return romanian.agree(adjective.romanian, actor.noun.romanian, actor.plural)
    gender = "f" if isinstance(actor, Name) and actor.feminine else "m"
    return romanian.agree(adjective.romanian, romanian.Noun("", "", gender), _number(actor)[1])


def clause(meaning: Clausal, asks: bool = False, subject: str = "dropped") -> str:
    """A clause without capital and full stop; a question keeps the order of a statement.

    ``subject`` is "dropped" where the verb shows the person, "overt" in a contrast, or "none".
    """
    if isinstance(meaning, Existence):
        be = romanian.be(meaning.tense, 3, meaning.phrase.plural)
        be = f"nu {be}" if meaning.phrase.determiner == "no" else be
        what, where = phrase(meaning.phrase), _place(meaning.place)
        return f"{be} {what} {where}" if asks else f"{where} {be} {what}"
    if subject == "dropped":
        subject = _subject(meaning.subject, meaning.tense)
    else:
        subject = phrase(meaning.subject) if subject == "overt" else ""
    if isinstance(meaning, Clause):
        words = (subject, _verbs(meaning), _complements(meaning))
    else:
        be = romanian.be(meaning.tense, *_number(meaning.subject))
        words = (subject, "nu" if meaning.negative else "", be, _predicate(meaning))
    return " ".join(word for word in words if word)


def _predicate(meaning: Clausal) -> str:
    if isinstance(meaning, Location):
        return _place(meaning.place)
    adjective = _agreeing(meaning.adjective, meaning.subject)
    return f"mai {adjective} decât {phrase(meaning.standard)}" if meaning.standard else adjective


def speak(sentence: Sentence) -> str:
    """The Romanian sentence, with its capital and its full stop or question mark."""
    if isinstance(sentence, Plain):
        text = clause(sentence.clause, sentence.asks) + ("?" if sentence.asks else ".")
    elif isinstance(sentence, Wh):
        asked = sentence.clause
        words = (_WH[sentence.word], _verbs(asked), _subject(asked.subject, asked.tense), _complements(asked))
        text = " ".join(word for word in words if word) + "?"
    elif isinstance(sentence, Report):
        subject = _subject(sentence.subject, sentence.tense)
        verb = romanian.conjugate(sentence.verb.romanian, sentence.tense, *_number(sentence.subject))
        text = f"{subject} {verb} că {clause(sentence.clause)}.".strip()
    elif isinstance(sentence, Joined):
        contrast = not sentence.shared and sentence.conjunction != "because"
        first = clause(sentence.first, subject="overt" if contrast else "dropped")
        second = clause(sentence.second, subject="none" if sentence.shared else ("overt" if contrast else "dropped"))
        text = f"{first}{' și' if sentence.shared else _JOIN[sentence.conjunction]} {second}."
    else:
        text = f"când {clause(sentence.first)}, {clause(sentence.second)}."
    return text[0].upper() + text[1:]
