"""Drawing phrases that make sense: who may do what, what may be owned, counted, red or sold."""

from __future__ import annotations

from functools import cache

from attn_reg_plugin.data.phrasebook.chance import Chance
from attn_reg_plugin.data.phrasebook.entries import Adjective, Name, Noun, Time, Verb
from attn_reg_plugin.data.phrasebook.lexicon_nouns import NAMES, NOUNS
from attn_reg_plugin.data.phrasebook.lexicon_words import ADJECTIVES, QUANTITIES, TIMES
from attn_reg_plugin.data.phrasebook.meaning import THEY, WE, YOU, Actor, I, Phrase, Place, Pronoun

PRONOUNS = (I, YOU, WE, THEY)
_OWNED = ("goods", "pet", "farm", "kin", "owned", "small", "text", "furniture", "cooking")


@cache
def nouns_with(tags: frozenset[str]) -> tuple[Noun, ...]:
    """The nouns that have at least one of the tags."""
    return tuple(noun for noun in NOUNS if noun.tags & tags)


@cache
def adjectives_for(noun: Noun) -> tuple[Adjective, ...]:
    """The adjectives that go with a noun."""
    return tuple(adjective for adjective in ADJECTIVES if adjective.goes_with & noun.tags)


@cache
def times_for(tense: str) -> tuple[Time, ...]:
    """The adverbs of time of a tense."""
    return tuple(time for time in TIMES if tense in time.tenses)


def tags(text: str) -> frozenset[str]:
    """The tags in a string, as a set."""
    return frozenset(text.split())


class Phrases:
    """Draws phrases; ``used`` keeps a sentence from naming the same thing twice."""

    def __init__(self, chance: Chance) -> None:
        """Draw with this source of choices."""
        self.chance = chance
        self.used: set[str] = set()

    def noun(self, wanted: frozenset[str], without: frozenset[str] = frozenset()) -> Noun:
        """A noun with one of the wanted tags and none of the others, new to the sentence if possible."""
        for _ in range(20):
            noun = self.chance.pick(nouns_with(wanted))
            if noun.key not in self.used and not noun.tags & without:
                break
        self.used.add(noun.key)
        return noun

    def name(self) -> Name:
        """A name new to the sentence if possible."""
        for _ in range(20):
            name = self.chance.pick(NAMES)
            if name.key not in self.used:
                break
        self.used.add(name.key)
        return name

    def owner(self) -> Phrase | Name:
        """A possessor: a name, the doctor, the children, my friend."""
        if self.chance.happens(0.3):
            return self.name()
        noun = self.noun(tags("person"))
        plural = self.chance.happens(0.15)
        determiner = "my" if "owned" in noun.tags and self.chance.happens(0.6) else "the"
        return Phrase(noun, determiner, plural)

    def definite(self, noun: Noun, plain: bool = False) -> Phrase:
        """A known thing: the, this, my, the doctor's; ``plain`` leaves out owners."""
        owned = not noun.tags.isdisjoint(_OWNED) and not plain
        kin = "kin" in noun.tags
        common = 0 if kin else (1 if "owned" in noun.tags else 5)
        weights = [("the", common), ("this", 0 if kin or plain else 0.7)]
        if owned or kin:
            weights += [("my", 1), ("your", 0.4), ("our", 0.4), ("of", 0.9)]
        determiner = self.chance.weighted(weights)
        plural = noun.tags.isdisjoint(("mass", "single")) and self.chance.happens(0.2)
        possessor = self.owner() if determiner == "of" else None
        return Phrase(noun, determiner, plural, self.adjective(noun, 0.28), possessor=possessor)

    def indefinite(self, noun: Noun) -> Phrase:
        """Something new: a cat, three cats, many cats, milk."""
        adjective = self.adjective(noun, 0.28)
        if "mass" in noun.tags:
            return Phrase(noun, "bare", adjective=adjective)
        if "single" in noun.tags or self.chance.happens(0.65):
            return Phrase(noun, "a", adjective=adjective)
        return Phrase(noun, "quantity", True, adjective, self.chance.pick(QUANTITIES))

    def adjective(self, noun: Noun, probability: float) -> Adjective | None:
        """An adjective that goes with the noun, or none; kin has none."""
        fitting = adjectives_for(noun)
        if not fitting or "kin" in noun.tags or not self.chance.happens(probability):
            return None
        return self.chance.pick(fitting)

    def subject(self, wanted: frozenset[str], known: bool = False) -> Actor:
        """Who does it; ``known`` leaves out a cat, many cats, every cat."""
        kind = self.chance.weighted((("noun", 6), ("kin", 1), ("name", 1.2), ("pronoun", 1.6)))
        if kind == "pronoun" and "person" in wanted:
            return self.chance.pick(PRONOUNS)
        if kind == "name" and "person" in wanted:
            return self.name()
        if kind == "kin" and "kin" in wanted:
            return self.definite(self.noun(tags("kin")))
        noun = self.noun(wanted, tags("kin") if kind != "kin" else frozenset())
        if known or "kin" in noun.tags or self.chance.happens(0.8):
            return self.definite(noun)
        if self.chance.happens(0.3) and "single" not in noun.tags:
            return Phrase(noun, "every")
        return self.indefinite(noun)

    def object(self, verb: Verb, known: bool = False) -> Phrase | Name:
        """What it is done to; ``known`` leaves out three cats (but not milk)."""
        if "person" in verb.objects and self.chance.happens(0.12):
            return self.name()
        noun = self.noun(verb.objects)
        if "kin" in noun.tags:
            return self.definite(noun)
        if "mass" in noun.tags and self.chance.happens(0.6):
            return self.indefinite(noun)
        return (
            self.definite(noun, "unowned" in verb.flags) if known or self.chance.happens(0.6) else self.indefinite(noun)
        )

    def person(self) -> Phrase | Name:
        """A known person: for the girl, to Ana, with my brother."""
        kind = self.chance.weighted((("noun", 6), ("kin", 1.5), ("name", 2)))
        if kind == "name":
            return self.name()
        return self.definite(self.noun(tags("kin" if kind == "kin" else "person")))

    def place(self, wanted: frozenset[str], without: frozenset[str] = frozenset()) -> Place:
        """Somewhere: in the garden, at the doctor's house, in a big city."""
        noun = self.noun(wanted, without)
        if self.chance.happens(0.07):
            return Place(Phrase(noun, "a", adjective=self.adjective(noun, 0.5)))
        determiner = "my" if self.chance.happens(0.05) and not noun.tags.isdisjoint(_OWNED) else "the"
        return Place(Phrase(noun, determiner, adjective=self.adjective(noun, 0.2)))

    def time(self, tense: str) -> Time:
        """An adverb that fits the tense."""
        return self.chance.pick(times_for(tense))


def is_animal(actor: Actor) -> bool:
    """Whether the subject is an animal, which goes to fewer places."""
    return isinstance(actor, Phrase) and "animal" in actor.noun.tags


def same_person(first: Actor, second: Actor) -> bool:
    """Whether two subjects are the same, so that the second would be left out."""
    return first == second if isinstance(first, Pronoun) else first is second
