import random
import re
from itertools import islice
from pathlib import Path

import pytest
from char_tokenizer import CharTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.tasks.niah import Niah, TextNiah
from kvbench.tasks.task import Example, Tokenizer
from kvbench.tasks.words import written_sentences

DEPTHS = (0.0, 0.25, 0.5, 1.0)


def used(example: Example, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(example.prompt + example.answer_prefix)) + example.max_new_tokens


def context(example: Example) -> str:
    return example.prompt.split("\n\n")[1]


@pytest.mark.parametrize("haystack", ["sentences", "noise"])
def test_a_prompt_fills_its_length_to_within_a_sentence(tokenizer: Tokenizer, haystack: str) -> None:
    sentences = (
        list(islice(written_sentences(random.Random(0)), 2000)) if haystack == "sentences" else ["The sky is blue. "]
    )
    longest = max(len(tokenizer.encode(sentence)) for sentence in sentences) + 5
    for example in Niah(lengths=(1500, 3000), depths=DEPTHS, haystack=haystack, template_tokens=9).examples(
        tokenizer, 5
    ):
        assert example.metadata["length"] - longest <= used(example, tokenizer) + 9 <= example.metadata["length"]


def test_the_asked_number_stands_once_and_at_its_depth(tokenizer: Tokenizer) -> None:
    for example in Niah(lengths=(4000,), depths=DEPTHS, repeats=3, keys=4).examples(tokenizer, 1):
        (number,) = example.references
        assert (example.prompt + example.answer_prefix).count(number) == 1
        text = context(example)
        needle = re.search(rf"The secret number of \S+ is {number}\.", text)
        others = len(text) - len(needle[0])
        longest = max(map(len, re.findall(r"[^.]+\.", text))) + 4 * 50  # the other needles stand in the text as well
        assert abs(needle.start() - example.metadata["depth"] * others) <= longest


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), limit=st.integers(0, 12))
def test_an_example_depends_on_the_seed_and_not_on_the_limit(seed: int, limit: int) -> None:
    task = Niah(lengths=(400, 600), depths=(0.2, 0.8), repeats=3, keys=2)
    tokenizer = CharTokenizer()
    everything = list(task.examples(tokenizer, seed))
    assert list(task.examples(tokenizer, seed, limit)) == everything[:limit]
    assert len({example.prompt for example in everything}) == 12
    assert next(task.examples(tokenizer, seed + 1)) != everything[0]


def test_all_numbers_of_the_keys_asked_for_are_references_and_no_other(words: Tokenizer) -> None:
    task = Niah(lengths=(1000,), depths=(0.5,), repeats=5, keys=5, values=3, queries=2)
    for example in task.examples(words, 2):
        told = re.findall(r"The secret number of (\S+) is (\d{7})\.", context(example))
        asked = re.search(r"What are the secret numbers of (\S+) and (\S+)\?", example.prompt)
        assert len(told) == 15
        assert len({key for key, _ in told}) == 5
        assert set(example.references) == {number for key, number in told if key in asked.groups()}
        assert example.answer_prefix == f" The secret numbers of {asked[1]} and {asked[2]} are"


def test_the_score_is_the_share_of_the_numbers_found(words: Tokenizer) -> None:
    task = Niah(lengths=(300,), depths=(0.5,), keys=4, queries=4)
    example = next(task.examples(words, 0))
    assert task.score(" and ".join(example.references), example) == 1.0
    assert task.score(f" {example.references[2]}.", example) == 0.25
    assert task.score("", example) == 0.0


def test_a_folder_of_texts_is_the_haystack_again_and_again(tmp_path: Path, words: Tokenizer) -> None:
    (tmp_path / "b.txt").write_text("Beta comes second. It is short.", encoding="utf-8")
    (tmp_path / "a.txt").write_text("Alpha comes first! Is it so?", encoding="utf-8")
    example = next(Niah(lengths=(150,), depths=(0.0,), data_dir=str(tmp_path)).examples(words, 0))
    text = re.sub(r"The secret number of \S+ is \d+\. ", "", example.prompt)
    assert text.startswith(
        "Read this text and remember what it says.\n\n"
        "Alpha comes first! Is it so?\n\nBeta comes second. It is short.\n\nAlpha comes first!"
    )


def test_a_text_needle_is_scored_by_its_words(words: Tokenizer) -> None:
    task = TextNiah(lengths=(300,), depths=(0.3,))
    example = next(task.examples(words, 0))
    assert example.prompt.count("sandwich") == 1
    assert task.score(" eat a sandwich", example) == pytest.approx(3 / 11)
    assert task.stop == ("\n",)


def test_a_number_that_stands_in_the_folder_is_not_hidden(tmp_path: Path, words: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text(
        ". ".join(str(number) for number in range(10, 100) if number != 57), encoding="utf-8"
    )
    task = Niah(lengths=(200,), depths=(0.5,), digits=2, data_dir=str(tmp_path))
    assert {example.references for example in task.examples(words, 0)} == {("57",)}
