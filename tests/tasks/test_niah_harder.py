"""Paraphrased needles and needles that look alike: what a prompt contains, and what is scored."""

import re
from itertools import islice
from pathlib import Path

import pytest
from nltk.stem.porter import PorterStemmer

from kvbench.tasks.niah_harder import ORDINALS, NiahMulti, NiahParaphrased
from kvbench.tasks.task import Example, Tokenizer
from kvbench.tasks.words import shipped

DEPTHS = (0.0, 0.3, 0.7, 1.0)
FUNCTION_WORDS = {"whose", "is", "in", "the", "to", "next"}
PLACES, PEOPLE = shipped("landmarks.json")["places"], shipped("landmarks.json")["people"]


def stems(text: str) -> set[str]:
    return {PorterStemmer().stem(word) for word in re.findall(r"[a-z]+", text.lower()) if word not in FUNCTION_WORDS}


def context(example: Example) -> str:
    return example.prompt.split("\n\n")[1]


def examples(task: NiahParaphrased | NiahMulti, tokenizer: Tokenizer, seed: int = 3) -> list[Example]:
    return list(islice(task.examples(tokenizer, seed), 12))


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("stated", [False, True])
def test_the_question_leads_to_the_needle_by_meaning_and_by_no_word(
    tokenizer: Tokenizer, hops: int, stated: bool
) -> None:
    task = NiahParaphrased(lengths=(2500,), depths=DEPTHS, repeats=3, hops=hops, stated=stated)
    asked = set()
    for example in examples(task, tokenizer):
        (person,), text = example.references, context(example)
        needle = re.search(rf"{person} lives next to (.+?)\.", text)
        landmark, city, country = next(place for place in PLACES if place[0] == needle[1])
        question = example.question + example.answer_prefix
        assert (city, country)[hops - 1] in question
        assert not stems(needle[0]) & stems(question.replace("Question", "").replace("Answer", ""))
        assert len(re.findall("lives next to", text)) == 4
        assert (f"{landmark[0].upper()}{landmark[1:]} lies in {city}." in text) == stated
        assert (f"{city} lies in {country}." in text) == (stated and hops == 2)
        rest = re.sub(r"\S+ lives next to .+?\.|[A-Z][^.]* lies in .+?\.", "", text)
        assert not [word for word in [*PEOPLE, *(part for place in PLACES for part in place)] if word in rest]
        asked.add(example.references)
    assert len(asked) > 6


def test_countries_cities_and_landmarks_have_separate_scores() -> None:
    for column in zip(*PLACES, strict=True):
        assert len(set(column)) == len(PLACES)
    assert len(set(PEOPLE)) == len(PEOPLE)


def test_strict_takes_the_first_name_and_the_default_any(tokenizer: Tokenizer) -> None:
    example = next(NiahParaphrased(lengths=(2500,)).examples(tokenizer, 0))
    (right,) = example.references
    wrong = next(person for person in PEOPLE if person != right)
    strict, lax = NiahParaphrased(strict=True), NiahParaphrased()
    outputs = (f"It is {right.lower()}.", f"{right}, not {wrong}", f"{wrong}, or {right}", wrong, "nobody")
    assert [strict.score(output, example) for output in outputs] == [1, 1, 0, 0, 0]
    assert [lax.score(output, example) for output in outputs] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("needles", [2, 4, 10])
def test_the_asked_number_is_the_ith_of_the_text_and_at_its_depth(tokenizer: Tokenizer, needles: int) -> None:
    task, seen = NiahMulti(lengths=(3500,), depths=DEPTHS, repeats=3, needles=needles), set()
    for example in examples(task, tokenizer):
        text = context(example)
        numbers = re.findall(r"The secret number is (\d{7})\.", text)
        assert len(set(numbers)) == len(numbers) == needles
        asked = next(i for i, word in enumerate(ORDINALS) if f"the {word} secret" in example.question)
        assert example.references == (numbers[asked],)
        place = text.index(f"The secret number is {numbers[asked]}") / len(text)
        assert abs(place - example.metadata["depth"]) < 0.25
        assert task.score(f" {numbers[asked]}.", example) == 1
        assert task.score(numbers[asked - 1], example) == 0
        seen.add(asked)
    assert len(seen) > 1


def test_what_gives_the_answer_away_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shares words with the needle"):
        examples(NiahParaphrased(lengths=(2500,), question="Who lives in {fact}?"), tokenizer)
    (tmp_path / "a.txt").write_text("The people of Paris, " + ", ".join(PEOPLE) + ". " * 20)
    with pytest.raises(ValueError, match="which is a part of the needles"):
        examples(NiahParaphrased(lengths=(2500,), data_dir=str(tmp_path)), tokenizer)
    for wrong in ({"needles": 11}, {"needles": 1}):
        with pytest.raises(ValueError, match="needles"):
            NiahMulti(**wrong)
    with pytest.raises(ValueError, match="hops"):
        NiahParaphrased(hops=3)
