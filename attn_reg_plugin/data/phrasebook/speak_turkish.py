"""A meaning as a Turkish sentence: verb last, cases for prepositions, nominalized clauses, mi."""

from __future__ import annotations

from attn_reg_plugin.data.phrasebook import turkish
from attn_reg_plugin.data.phrasebook.entries import Name, Verb
from attn_reg_plugin.data.phrasebook.lexicon_verbs import WANT
from attn_reg_plugin.data.phrasebook.meaning import (
    WE,
    WHO,
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
    State,
    Wh,
)

_OWNERS = {"my": (1, False), "your": (2, False), "our": (1, True), "of": (3, False)}
_BEFORE = {"this": "bu", "every": "her"}
_RELATIONS = {"on": "üstünde", "under": "altında", "behind": "arkasında", "front": "önünde", "near": "yanında"}
_WH = {"where": "nerede", "when": "ne zaman", "why": "neden"}
_JOIN = {"and": " ve", "but": ", ama", "because": ", çünkü"}
_PRONOUNS = {
    key: turkish.Stem(form)
    for key, form in (("I", "ben"), ("you", "sen"), ("we", "biz"), ("they", "onlar"), ("who", "kim"))
}


def _number(actor: Actor) -> tuple[int, bool]:
    """The person of the verb; after a plural noun the verb stays in the singular."""
    return (actor.person, actor.plural) if isinstance(actor, Pronoun) else (3, False)


def phrase(actor: Actor, case: str = "nominative") -> str:
    """A phrase, a name or a pronoun in a case: doktorun küçük kedisini, üç elma, Ana'ya."""
    inflect = turkish.CASES[case]
    if isinstance(actor, Pronoun):
        return inflect(_PRONOUNS[actor.key]).form
    if isinstance(actor, Name):
        return inflect(actor.turkish).form
    stem = actor.noun.turkish
    if actor.plural and actor.determiner != "quantity":
        stem = turkish.plural(stem)
    if actor.determiner in _OWNERS:
        stem = turkish.possessive(stem, *_OWNERS[actor.determiner])
    words = (
        _relative(actor.relative) if actor.relative else "",
        _BEFORE.get(actor.determiner, ""),
        phrase(actor.possessor, "genitive") if actor.possessor else "",
        actor.quantity.turkish if actor.quantity else "",
        actor.adjective.turkish if actor.adjective else "",
        "bir" if actor.determiner == "a" else "",
        inflect(stem).form,
    )
    return " ".join(word for word in words if word)


def _definite(thing: Phrase | Name) -> bool:
    return isinstance(thing, Name) or thing.definite


def _object(verb: Verb, thing: Phrase | Name) -> str:
    """The object in the case of the verb; what is neither known nor human has no accusative."""
    case = verb.turkish.case
    marked = _definite(thing) or thing.personal or "specific" in verb.flags
    return phrase(thing, case if marked or case != "accusative" else "nominative")


def _relative(relative: Relative) -> str:
    return f"{_object(relative.verb, relative.object)} {turkish.subject_participle(relative.verb.turkish)}"


def _place(place: Place, case: str = "locative") -> str:
    if place.relation:
        return f"{phrase(place.phrase, 'genitive')} {_RELATIONS[place.relation]}"
    return phrase(place.phrase, case)


def _complements(clause: Clause, asked: str = "") -> str:
    """All that stands between the subject and the verb, what is new nearest to the verb.

    A question word stands by the verb too, before an indefinite object; only neden comes first.
    """
    words = [asked] if asked == _WH["why"] else []
    if clause.time:
        words.append(clause.time.turkish)
    if clause.companion:
        words.append(phrase(clause.companion, "instrumental"))
    if clause.means:
        words.append(turkish.instrumental(clause.means.turkish).form)
    if clause.place:
        words.append(_place(clause.place, clause.motion.turkish if clause.motion else "locative"))
    if clause.beneficiary:
        words.append(f"{phrase(clause.beneficiary)} için")
    pair = [phrase(clause.recipient, "dative")] if clause.recipient else []
    known = clause.object is not None and _definite(clause.object)
    if known:
        pair.insert(0, _object(clause.verb, clause.object))
    if asked and asked not in words:
        pair.append(asked)
    if clause.object and not known:
        pair.append(_object(clause.verb, clause.object))
    return " ".join(words + pair)


def _verb(clause: Clause, asks: bool) -> str:
    verb, number = clause.verb.turkish, _number(clause.subject)
    if clause.modal == "want":
        wants = turkish.finite(WANT.turkish, clause.tense, *number, clause.negative, asks)
        return f"{turkish.infinitive(verb)} {wants}"
    if clause.modal == "can" and clause.negative:
        return turkish.inability(verb, *number)
    if clause.modal:
        can = clause.modal == "can"
        stem = turkish.ability_stem(verb) if can else turkish.necessity_stem(verb, clause.negative)
        return turkish.question(stem, *number) if asks else turkish.with_person(stem, *number)
    return turkish.finite(verb, clause.tense, *number, clause.negative, asks)


def _subject(actor: Actor, case: str = "nominative") -> str:
    return "" if actor in (I, YOU, WE) else phrase(actor, case)


def _be(predicate: str, meaning: State | Location, asks: bool) -> str:
    """The predicate with the copula of its tense: hasta, hastayım, hasta değildi, hasta olacak."""
    number = _number(meaning.subject)
    number = (3, False) if number == (3, True) else number
    if meaning.tense == "future":
        return f"{predicate} {turkish.finite(turkish.verb('ol'), 'future', *number, meaning.negative, asks)}"
    past = meaning.tense == "past"
    if meaning.negative:
        predicate += " değil"
    if asks:
        return turkish.question(predicate, *number, past)
    return (turkish.past_with_person if past else turkish.with_person)(predicate, *number)


def _existence(meaning: Existence, asks: bool) -> str:
    there = "yok" if meaning.phrase.determiner == "no" else "var"
    past = meaning.tense == "past"
    if asks:
        there = turkish.question(there, 3, False, past)
    elif past:
        there = turkish.past_with_person(there, 3, False)
    return f"{_place(meaning.place)} {phrase(meaning.phrase)} {there}"


def clause(meaning: Clausal, asks: bool = False, subject: str = "dropped", asked: str = "") -> str:
    """A clause without capital and full stop; ``asked`` is a question word, which stands by the verb.

    ``subject`` is "dropped" where the verb shows the person, "overt" in a contrast, or "none".
    """
    if isinstance(meaning, Existence):
        return _existence(meaning, asks)
    if subject == "dropped":
        subject = _subject(meaning.subject)
    else:
        subject = phrase(meaning.subject) if subject == "overt" else ""
    if isinstance(meaning, Clause):
        if meaning.subject == WHO:
            subject, asked, asks = "", subject, False
        words = (subject, _complements(meaning, asked), _verb(meaning, asks))
    elif isinstance(meaning, Location):
        words = (subject, _be(_place(meaning.place), meaning, asks))
    else:
        standard = f"{phrase(meaning.standard, 'ablative')} daha" if meaning.standard else ""
        words = (subject, standard, _be(meaning.adjective.turkish, meaning, asks))
    return " ".join(word for word in words if word)


def _nominalized(meaning: Clause, case: str, subject_case: str) -> str:
    """The clause as a noun: öğretmenin kitabı okuduğunu, öğretmen geldiğinde."""
    stem = turkish.clause_noun(meaning.verb.turkish, meaning.tense, *_number(meaning.subject), meaning.negative)
    words = (_subject(meaning.subject, subject_case), _complements(meaning), turkish.CASES[case](stem).form)
    return " ".join(word for word in words if word)


def speak(sentence: Sentence) -> str:
    """The Turkish sentence, with its capital and its full stop or question mark."""
    if isinstance(sentence, Plain):
        text = clause(sentence.clause, sentence.asks) + ("?" if sentence.asks else ".")
    elif isinstance(sentence, Wh):
        text = clause(sentence.clause, asked=_WH[sentence.word]) + "?"
    elif isinstance(sentence, Report):
        subject = _subject(sentence.subject)
        verb = turkish.finite(sentence.verb.turkish, sentence.tense, *_number(sentence.subject))
        embedded = _nominalized(sentence.clause, "accusative", "genitive")
        text = f"{subject}{', ' if subject else ''}{embedded} {verb}."
    elif isinstance(sentence, Joined):
        contrast = not sentence.shared and sentence.conjunction != "because"
        first = clause(sentence.first, subject="overt" if contrast else "dropped")
        second = clause(sentence.second, subject="none" if sentence.shared else ("overt" if contrast else "dropped"))
        text = f"{first}{_JOIN[sentence.conjunction]} {second}."
    else:
        text = f"{_nominalized(sentence.first, 'locative', 'nominative')} {clause(sentence.second)}."
    return turkish.capitalize(text)
