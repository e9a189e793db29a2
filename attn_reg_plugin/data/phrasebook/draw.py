"""Drawing whole sentences: one function a template, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attn_reg_plugin.data.phrasebook.chance import Chance
from attn_reg_plugin.data.phrasebook.draw_phrases import (
    Phrases,
    adjectives_for,
    is_animal,
    same_person,
    tags,
)
from attn_reg_plugin.data.phrasebook.entries import Adjective, Noun, Verb
from attn_reg_plugin.data.phrasebook.lexicon_nouns import NOUNS
from attn_reg_plugin.data.phrasebook.lexicon_verbs import GIVING, INTRANSITIVE, MOTION, REPORTING, TRANSITIVE
from attn_reg_plugin.data.phrasebook.lexicon_words import ADJECTIVES
from attn_reg_plugin.data.phrasebook.meaning import (
    WE,
    WHO,
    Actor,
    Clause,
    Existence,
    I,
    Joined,
    Location,
    Phrase,
    Place,
    Plain,
    Relative,
    Report,
    Sentence,
    State,
    Wh,
    When,
)

_FEELINGS = tuple(adjective for adjective in ADJECTIVES if "feeling" in adjective.goes_with)
_MEANS = tuple(noun for noun in NOUNS if "means" in noun.tags)
_KINDS = tags("person kin animal food drink text thing furniture clothes vehicle building area room")
_OUTSIDE = tags("outside")
_NO_GOAL = tags("water long")


class Sentences:
    """Draws one meaning after another; every template is a method without arguments."""

    def __init__(self, chance: Chance) -> None:
        """Draw with this source of choices."""
        self.chance = chance
        self.phrases = Phrases(chance)

    def draw(self) -> Sentence:
        """One sentence of any template."""
        self.phrases.used.clear()
        return self.chance.weighted(TEMPLATES)(self)

    def _tense(self, verb: Verb, allowed: str = "present habit past future") -> str:
        possible = allowed.split()
        if "present" in verb.flags:
            possible = [tense for tense in possible if tense == "present"]
        if "event" in verb.flags:
            possible = [tense for tense in possible if tense in ("past", "future")]
        weights = {"present": 3, "habit": 2, "past": 4, "future": 2}
        return self.chance.weighted([(tense, weights[tense]) for tense in possible])

    def _timed(self, clause: Clause, probability: float = 0.4) -> Clause:
        """The clause with an adverb of time: always with a habit, never with know or love."""
        stative = not clause.verb.flags.isdisjoint(("timeless", "stative"))
        if clause.tense != "habit":
            skip = "timeless" in clause.verb.flags or (stative and clause.tense == "present")
            if skip or clause.modal in ("must", "can") or not self.chance.happens(probability):
                return clause
        elif "timeless" in clause.verb.flags:
            return replace(clause, tense="present")
        return replace(clause, time=self.phrases.time(clause.tense))

    def _action(self, verb: Verb, subject: Actor, tense: str, known: bool = False) -> Clause:
        """A verb with an object, perhaps with a place or a beneficiary."""
        clause = Clause(subject, verb, tense, self.phrases.object(verb, known))
        if "benefit" in verb.flags and self.chance.happens(0.35):
            return replace(clause, beneficiary=self.phrases.person())
        if verb.places and not is_animal(subject) and self.chance.happens(0.3):
            return replace(clause, place=self.phrases.place(verb.places))
        return clause

    def _happening(self, known: bool = False, tenses: str = "present habit past future") -> Clause:
        """Any clause with a verb: transitive, giving, motion, intransitive."""
        kind = self.chance.weighted((("action", 6), ("gift", 2.2), ("motion", 1.8), ("still", 1.6)))
        return getattr(self, f"_{kind}_clause")(known, tenses)

    def _verb(self, verbs: tuple[Verb, ...], tenses: str) -> Verb:
        """One of the verbs that has one of the tenses."""
        timed = "present" in tenses
        verbs = tuple(verb for verb in verbs if timed or "present" not in verb.flags)
        if not ("past" in tenses or "future" in tenses):
            verbs = tuple(verb for verb in verbs if "event" not in verb.flags)
        return self.chance.pick(verbs)

    def _action_clause(self, known: bool, tenses: str) -> Clause:
        verb = self._verb(TRANSITIVE, tenses)
        subject = self.phrases.subject(verb.subjects, known)
        return self._timed(self._action(verb, subject, self._tense(verb, tenses), known))

    def _gift_clause(self, known: bool, tenses: str) -> Clause:
        verb = self._verb(GIVING, tenses)
        subject = self.phrases.subject(verb.subjects, known)
        thing = self.phrases.object(verb, known)
        clause = Clause(subject, verb, self._tense(verb, tenses), thing, recipient=self.phrases.person())
        return self._timed(clause, 0.25)

    def _motion_clause(self, known: bool, tenses: str) -> Clause:
        verb = self._verb(tuple(verb for verb, _ in MOTION), tenses)
        motion = next(motion for mover, motion in MOTION if mover is verb)
        subject = self.phrases.subject(verb.subjects, known)
        animal = is_animal(subject)
        without = _NO_GOAL | tags("room") if "event" in verb.flags else _NO_GOAL
        place = self.phrases.place(_OUTSIDE if animal else tags("in at on"), without)
        clause = Clause(subject, verb, self._tense(verb, tenses), place=place, motion=motion)
        if not animal and self.chance.happens(0.25):
            clause = replace(clause, companion=self.phrases.person())
        elif not animal and place.phrase.noun.tags & tags("building town") and self.chance.happens(0.25):
            clause = replace(clause, means=self.chance.pick(_MEANS))
        return self._timed(clause)

    def _still_clause(self, known: bool, tenses: str) -> Clause:
        verb = self._verb(INTRANSITIVE, tenses)
        subject = self.phrases.subject(verb.subjects, known)
        places = _OUTSIDE if is_animal(subject) and "outside" in verb.places else verb.places
        clause = Clause(subject, verb, self._tense(verb, tenses), place=self.phrases.place(places))
        if not is_animal(subject) and self.chance.happens(0.2):
            clause = replace(clause, companion=self.phrases.person())
        return self._timed(clause)

    def statement(self) -> Sentence:
        """The small cat sees the red houses; the nurse gave the book to the girl."""
        return Plain(self._happening())

    def denial(self) -> Sentence:
        """I did not go to the village yesterday."""
        return Plain(replace(self._happening(known=True), negative=True))

    def question(self) -> Sentence:
        """Did the teacher buy a book for the girl?"""
        return Plain(self._spoken_to("present habit past future"), asks=True)

    def _spoken_to(self, tenses: str) -> Clause:
        """A clause one may ask about: not what I or we do ourselves."""
        clause = self._happening(True, tenses)
        while clause.subject in (I, WE):
            clause = self._happening(True, tenses)
        return clause

    def who_question(self) -> Sentence:
        """Who opened the window yesterday?"""
        clause = self._happening(True, tenses="past future")
        return Plain(replace(clause, subject=WHO), asks=True)

    def wh_question(self) -> Sentence:
        """Where will the driver wait for the tourists?"""
        word = self.chance.pick(("where", "when", "why"))
        tenses = "present past future" if word == "why" else "past future"
        clause = self._spoken_to(tenses)
        while word == "where" and clause.motion:
            clause = self._spoken_to(tenses)
        if word == "where":
            clause = replace(clause, place=None)
        return Wh(word, replace(clause, time=None) if word == "when" else clause)

    def modal(self) -> Sentence:
        """The girl wants to buy a book; we must help the teacher; can you repair the clock?"""
        word = self.chance.pick(("want", "must", "can"))
        clause = self._happening(True, "past future")
        tense = self.chance.pick(("present", "past")) if word == "want" else "present"
        clause = replace(clause, modal=word, tense=tense, time=None)
        kind = self.chance.weighted((("state", 3), ("ask", 1), ("deny", 1)))
        if kind == "state" or word == "must" or (kind == "ask" and clause.subject in (I, WE)):
            return Plain(clause)
        return Plain(clause, asks=True) if kind == "ask" else Plain(replace(clause, negative=True))

    def _describable(self, compared: bool = False) -> tuple[Phrase, Adjective]:
        """A known thing without adjective, and an adjective to say of it."""
        while True:
            noun = self.chance.pick(NOUNS)
            fitting = tuple(item for item in adjectives_for(noun) if item.comparative or not compared)
            if fitting:
                self.phrases.used.add(noun.key)
                return replace(self.phrases.definite(noun), adjective=None), self.chance.pick(fitting)

    def description(self) -> Sentence:
        """The doctor's house is old; were the apples fresh?"""
        subject, adjective = self._describable()
        tense = self.chance.weighted((("present", 3), ("past", 2)))
        kind = self.chance.weighted((("state", 3), ("ask", 1), ("deny", 1)))
        return Plain(State(subject, adjective, tense, kind == "deny"), kind == "ask")

    def comparison(self) -> Sentence:
        """The teacher's car is faster than the bus."""
        subject, adjective = self._describable(compared=True)
        alike = subject.noun.tags & _KINDS
        others = tuple(noun for noun in NOUNS if adjective.goes_with & noun.tags and alike & noun.tags)
        other: Noun = self.chance.pick(others or (subject.noun,))
        standard = replace(self.phrases.definite(other), adjective=None)
        if other is subject.noun:
            standard = Phrase(other, "of", subject.plural, possessor=self.phrases.owner())
        negative = self.chance.happens(0.15)
        tense = self.chance.weighted((("present", 3), ("past", 1)))
        return Plain(State(subject, adjective, tense, negative, standard))

    def _feeling(self) -> State:
        subject = self.phrases.subject(tags("person kin"), known=True)
        if isinstance(subject, Phrase):
            subject = replace(subject, adjective=None)
        tense = self.chance.weighted((("present", 3), ("past", 3)))
        return State(subject, self.chance.pick(_FEELINGS), tense)

    def feeling(self) -> Sentence:
        """We were tired because the children did not sleep in the kitchen."""
        first = self._feeling()
        second = self._happening(True, "past future" if first.tense == "present" else "past")
        if same_person(first.subject, second.subject):
            return Plain(first)
        return Joined(first, "because", replace(second, negative=self.chance.happens(0.3)))

    def _where(self) -> Place:
        """A place for things: under the table, behind the house, near the bridge, in the garden."""
        kind = self.chance.weighted((("under", 1), ("on", 1), ("behind", 1), ("front", 1), ("near", 1), ("", 2)))
        wanted = {"": "in at on", "on": "surface", "under": "surface shade"}.get(kind, "landmark building")
        noun = self.phrases.noun(tags(wanted))
        return Place(Phrase(noun, adjective=self.phrases.adjective(noun, 0.3)), kind)

    def _thing_and_place(self) -> tuple[Noun, Place]:
        place = self._where()
        wanted = {"on": "small pet", "under": "small pet"}.get(place.relation, "person animal vehicle")
        if not place.relation and "inside" in place.phrase.noun.tags:
            wanted = "person furniture pet"
        if "water" in place.phrase.noun.tags:
            wanted = "person"
        return self.phrases.noun(tags(wanted), tags("fixed")), place

    def location(self) -> Sentence:
        """The black cat is under the table; were the tourists near the bridge?"""
        noun, place = self._thing_and_place()
        tense = self.chance.weighted((("present", 3), ("past", 2)))
        kind = self.chance.weighted((("state", 3), ("ask", 1), ("deny", 1)))
        meaning = Location(self.phrases.definite(noun), place, tense, kind == "deny")
        return Plain(meaning, kind == "ask")

    def existence(self) -> Sentence:
        """There are three cats in the garden; there was no chair in the kitchen."""
        noun, place = self._thing_and_place()
        phrase = self.phrases.indefinite(noun)
        kind = self.chance.weighted((("state", 3), ("ask", 1), ("deny", 1)))
        if kind == "deny":
            phrase = Phrase(noun, "no", adjective=phrase.adjective)
        meaning = Existence(phrase, place, self.chance.weighted((("present", 3), ("past", 2))))
        return Plain(meaning, kind == "ask")

    def report(self) -> Sentence:
        """The nurse says that the doctor will come from the village."""
        verb = self.chance.pick(REPORTING)
        tense = "present" if "present" in verb.flags else "past"
        if verb.flags.isdisjoint(("present", "past")):
            tense = self.chance.pick(("present", "past"))
        subject = self.phrases.subject(tags("person kin"), known=True)
        tenses = "past" if tense == "past" else ("future" if verb.key == "hope" else "past future")
        clause = self._happening(True, tenses)
        return Report(subject, verb, tense, replace(clause, negative=self.chance.happens(0.2)))

    def pair(self) -> Sentence:
        """The teacher is reading a book and the student is writing a letter."""
        tense = self.chance.pick(("present", "past", "future"))
        first = replace(self._happening(True, tense), time=None)
        second = replace(self._happening(True, tense), time=None)
        while same_person(first.subject, second.subject):
            second = replace(self._happening(True, tense), time=None)
        conjunction = self.chance.pick(("and", "but"))
        return Joined(first, conjunction, replace(second, negative=conjunction == "but"))

    def sequence(self) -> Sentence:
        """The girl opened the window and washed the red dress."""
        tense = self.chance.pick(("past", "future"))
        first = replace(self._action_clause(True, tense), time=None)
        second = replace(self._action_clause(True, tense), time=None, subject=first.subject)
        while is_animal(first.subject) or second.verb is first.verb:
            first = replace(self._action_clause(True, tense), time=None)
            second = replace(self._action_clause(True, tense), time=None, subject=first.subject)
        return Joined(first, "and", second, shared=True)

    def when(self) -> Sentence:
        """When the train came from the city, the tourists bought a map."""
        first = replace(self._happening(True, "past"), time=None)
        return When(first, replace(self._happening(True, "past"), time=None))

    def relative(self) -> Sentence:
        """The boy who broke the window is sad; the woman who sold the car went to the bank."""
        verb = self._verb(TRANSITIVE, "past")
        noun = self.phrases.noun(tags("person"))
        thing = self.phrases.object(verb, known=True)
        while not isinstance(thing, Phrase):
            thing = self.phrases.object(verb, known=True)
        subject = Phrase(noun, "the", self.chance.happens(0.2), relative=Relative(verb, thing))
        if self.chance.happens(0.4):
            tense = self.chance.pick(("present", "past"))
            return Plain(State(subject, self.chance.pick(adjectives_for(noun)), tense))
        clause = self._happening(True, "past future")
        while is_animal(clause.subject):
            clause = self._happening(True, "past future")
        return Plain(replace(clause, subject=subject))


TEMPLATES: tuple[tuple[Callable[[Sentences], Sentence], float], ...] = (
    (Sentences.statement, 20),
    (Sentences.denial, 9),
    (Sentences.question, 9),
    (Sentences.who_question, 4),
    (Sentences.wh_question, 5),
    (Sentences.modal, 10),
    (Sentences.description, 8),
    (Sentences.comparison, 6),
    (Sentences.feeling, 4),
    (Sentences.location, 7),
    (Sentences.existence, 7),
    (Sentences.report, 6),
    (Sentences.pair, 4),
    (Sentences.sequence, 4),
    (Sentences.when, 3),
    (Sentences.relative, 5),
)
"""Every template and how often it is drawn."""
