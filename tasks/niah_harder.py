"""Needles that cannot be found by matching words: paraphrased needles, and several similar ones."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache

from kvbench.errors import ConfigError, choice, whole_number
from kvbench.tasks.niah import MOST_DIGITS, NeedleGrid, Planted, distinct
from kvbench.tasks.scores import contains
from kvbench.tasks.task import Example, counts, slots
from kvbench.tasks.words import shipped

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
FUNCTION_WORDS = frozenset({"a", "an", "and", "are", "at", "by", "has", "in", "is", "next", "of", "the", "to", "whose"})


@cache
def places_known() -> tuple[tuple[str, str, str], ...]:
    """Landmarks with their city and country; no country occurs twice."""
    return tuple((landmark, city, country) for landmark, city, country in shipped("landmarks.json")["places"])


def content_words(text: str) -> set[str]:
    """The lower-case words of a text without function words, cut to stems of five letters."""
    return {word[:5] for word in re.findall(r"[^\W\d_]+", text.lower()) if word not in FUNCTION_WORDS}


@dataclass(frozen=True, kw_only=True)
class NiahParaphrased(NeedleGrid):
    """People who live next to landmarks; the question names a landmark's city or country, so it shares no content word.

    A needle is "Marta lives next to the Atomium." and its question "Whose home is in Brussels?". The answer needs the
    location of the landmark, and no policy can find the needle by its words. The text names `people` people in
    different countries; the needle of the question is at the example's depth, the others are anywhere.

    people: needles in a text. hops: 1, the question names the city; 2, the country. stated: the text also states where
    the landmarks are ("The Atomium lies in Brussels."), anywhere, so that no knowledge is needed. strict: the first
    name in the output must be the right one; otherwise the right name may occur anywhere.
    needle: a sentence with slots person and landmark. question, answer_prefix: with the slot fact.
    Source: the idea of NoLiMa (Modarressi et al. 2025, arXiv 2502.05167); the table and all sentences are ours.
    """

    name: str = "niah_paraphrased"
    chat: bool = True
    people: int = 4
    hops: int = 1
    stated: bool = False
    strict: bool = False
    needle: str = "{person} lives next to {landmark}."
    question: str = "Whose home is in {fact}?"
    answer_prefix: str = " The person whose home is in {fact} is"

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, 1, "people", high=len(places_known()))
        choice("hops", self.hops, 1, 2)
        for name in ("stated", "strict"):
            choice(name, getattr(self, name), True, False)
        slots("needle", self.needle, ("person", "landmark"))
        slots("question", self.question, ("fact",))
        slots("answer_prefix", self.answer_prefix, ("fact",), required=())

    def plant(self, rng: random.Random, text: str) -> Planted:
        """See `NeedleGrid.plant`: different people, landmarks of different countries."""
        people = rng.sample(shipped("landmarks.json")["people"], self.people)
        places = rng.sample(places_known(), self.people)
        fact = places[0][self.hops]
        facts = [
            [
                self.needle.format(person=person, landmark=landmark),
                *[f"{landmark[0].upper()}{landmark[1:]} lies in {city}."] * self.stated,
                *[f"{city} lies in {country}."] * (self.stated and self.hops == 2),
            ]
            for person, (landmark, city, country) in zip(people, places, strict=True)
        ]
        needles = [fact for kind in zip(*facts, strict=True) for fact in kind]
        question = self.question.format(fact=fact)
        shared = content_words(needles[0]) & content_words(question)
        if shared:
            raise ConfigError("question", self.question, why=f"shares words with the needle {needles[0]!r}: {shared}")
        known = next((word for word in (*people, *sum(places, ())) if word.lower() in text.lower()), None)
        if known is not None:
            raise ConfigError("data_dir", self.data_dir, why=f"contains {known!r}, which is a part of the needles")
        return Planted(tuple(needles), question, self.answer_prefix.format(fact=fact), (people[0],), tuple(facts[0]))

    def score(self, output: str, example: Example) -> float:
        """1 if the output names the person, 0 otherwise."""
        if not self.strict:
            return contains(output, example.references)
        names = "|".join(map(re.escape, shipped("landmarks.json")["people"]))
        first = re.search(rf"\b({names})\b", output, re.IGNORECASE)
        return float(first is not None and first[0].lower() == example.references[0].lower())


@dataclass(frozen=True, kw_only=True)
class NiahMulti(NeedleGrid):
    """`needles` random numbers in equal sentences; the question is about the i-th, with i drawn uniformly.

    The needles differ only in their order. The i-th is at the example's depth, earlier ones are between the start and
    that depth, later ones between that depth and the end.

    needles: 2 to 10. digits: of a number. needle: a sentence with the slot value. question, answer_prefix: with the
    slot ordinal.
    Source: ours, after the i-th of identical requests in OpenAI's MRCR.
    """

    name: str = "niah_multi"
    chat: bool = True
    needles: int = 4
    digits: int = 7
    needle: str = "The secret number is {value}."
    question: str = "What is the {ordinal} secret number in the text?"
    answer_prefix: str = " The {ordinal} secret number in the text is"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("needles", self.needles, 2, len(ORDINALS))
        whole_number("digits", self.digits, 2, MOST_DIGITS)
        slots("needle", self.needle, ("value",))
        slots("question", self.question, ("ordinal",))
        slots("answer_prefix", self.answer_prefix, ("ordinal",), required=())

    def plant(self, rng: random.Random, text: str) -> Planted:
        """See `NeedleGrid.plant`; needles are in the order of the text."""
        low, high = 10 ** (self.digits - 1), 10**self.digits
        values = distinct(self.needles, lambda: str(rng.randrange(low, high)), text)
        chosen = rng.randrange(self.needles)
        names = {"ordinal": ORDINALS[chosen]}
        needles = tuple(self.needle.format(value=value) for value in values)
        question, prefix = self.question.format(**names), self.answer_prefix.format(**names)
        return Planted(needles, question, prefix, (values[chosen],), (needles[chosen],))

    def places(self, rng: random.Random, planted: Planted, depth: float) -> tuple[float, ...]:
        """See `NeedleGrid.places`: rising depths."""
        chosen = planted.needles.index(self.needle.format(value=planted.references[0]))
        before = sorted(rng.uniform(0, depth) for _ in range(chosen))
        after = sorted(rng.uniform(depth, 1) for _ in planted.needles[chosen + 1 :])
        return *before, depth, *after
