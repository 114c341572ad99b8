"""Laws of the RULER generators: the prompt tells what is asked for, and has the length that was asked for."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.tasks.ruler.base import RulerTask, clean_up
from kvbench.tasks.ruler.common_words import CommonWords
from kvbench.tasks.ruler.frequent_words import FrequentWords
from kvbench.tasks.ruler.niah import RulerNiah
from kvbench.tasks.ruler.variable_tracking import VariableTracking
from kvbench.tasks.suite import RulerSuite
from kvbench.tasks.task import Example, Tokenizer

SINGLE = RulerNiah(name="niah_single_1")
MULTIKEY = RulerNiah(name="niah_multikey_2", haystack="needle")
UUIDS = RulerNiah(name="niah_multikey_3", haystack="needle", key="uuids", value="uuids")
VT, CWE, FWE = VariableTracking(), CommonWords(), FrequentWords()
ALL = [SINGLE, MULTIKEY, UUIDS, VT, CWE, FWE]
NAMES = [task.name for task in ALL]


def used(example: Example, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(example.prompt + example.answer_prefix)) + example.max_new_tokens


@pytest.mark.parametrize("task", ALL, ids=NAMES)
def test_lengths_are_true_to_the_tokenizer(task: RulerTask, tokenizer: Tokenizer) -> None:
    if task is VT and len(tokenizer.encode("x" * 10)) > 4:
        pytest.skip("the worked example of vt has 500 tokens at most, too few for a tokenizer of characters")
    for example in replace(task, length=6000).examples(tokenizer, 1, 3):
        assert 3000 < used(example, tokenizer) <= 6000


@pytest.mark.parametrize("task", ALL, ids=NAMES)
def test_a_model_that_thinks_gets_the_same_prompts_without_the_beginning_of_an_answer(
    task: RulerTask, words: Tokenizer
) -> None:
    begun = list(replace(task, length=1500).examples(words, 1, 2))
    assert all(example.answer_prefix for example in begun)
    free = replace(task, length=1500, answer_prefix=False)
    assert list(free.examples(words, 1, 2)) == [replace(example, answer_prefix="") for example in begun]
    suite = RulerSuite(name="s", tasks={"a": task}, length=1500, answer_prefix=False, think_end="</think>")
    (example,) = suite.examples(words, 1, 1)
    assert (example.answer_prefix, suite.task_of(example).think_end) == ("", "</think>")


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), limit=st.integers(0, 6), which=st.sampled_from(ALL))
def test_an_example_depends_on_the_seed_and_not_on_the_limit(
    seed: int, limit: int, which: RulerTask, words: Tokenizer
) -> None:
    task = replace(which, length=1500, samples=6)
    everything = list(task.examples(words, seed))
    assert [example.index for example in everything] == list(range(6))
    assert list(task.examples(words, seed, limit)) == everything[:limit]
    assert len({example.prompt for example in everything}) == 6
    assert next(task.examples(words, seed + 1)).prompt != everything[0].prompt


def test_following_the_assignments_leads_to_the_references(words: Tokenizer) -> None:
    for example in replace(VT, length=1024).examples(words, 7, 10):
        worked, asked = example.prompt.split("\nMemorize and track")
        for text, names in ((worked, worked.split("they are: ")[-1].split()), (asked, list(example.references))):
            value = re.search(r"assigned the value (\d{5}) in", text)
            assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
            reached = [name for name in assigned if follow(name, assigned) == value[1]]
            assert reached == names
            assert len(set(names)) == 5


def follow(name: str, assigned: dict[str, str]) -> str:
    return follow(assigned[name], assigned) if name in assigned else name


@pytest.mark.parametrize(("length", "common", "others"), [(2048, 6, 1), (4096, 30, 3)])
def test_the_ten_common_words_are_the_references(length: int, common: int, others: int, words: Tokenizer) -> None:
    for example in replace(CWE, length=length).examples(words, 7, 4):
        listed = example.prompt.split("Memorize the ones that appear most often.\n")[-1].split("\nQuestion")[0]
        entries = re.findall(r"(\d+)\. (\w+)", listed)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counts = Counter(word for _, word in entries)
        assert {word for word, count in counts.items() if count == common} == set(example.references)
        assert set(counts.values()) == {common, others}
        assert len(example.references) == 10


@pytest.mark.parametrize("task", [UUIDS, VT, FWE], ids=lambda task: task.name)
@pytest.mark.parametrize("length", [20, 240])
def test_a_length_that_nothing_fits_is_refused_instead_of_searched_for_ever(
    task: RulerTask, length: int, pieces: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=rf"length={length} is too small for {task.name}"):
        next(replace(task, length=length).examples(pieces, 0))


@pytest.mark.parametrize(
    ("output", "cleaned"),
    [("  12\t34 \n", "12\n34"), ("\x00\x01a", "a"), ("a\x1fb", "a\nb"), ("a\x7fb", "a\x7fb"), (" \n ", "")],
)
def test_control_characters_become_newlines(output: str, cleaned: str) -> None:
    assert clean_up(output) == cleaned


def test_a_number_cut_by_a_tab_is_a_miss_and_one_inside_a_longer_number_a_hit(words: Tokenizer) -> None:
    example = next(replace(SINGLE, length=1024).examples(words, 0))
    number = example.references[0]
    assert SINGLE.score(f"{number[:3]}\t{number[3:]}", example) == 0.0
    assert SINGLE.score(f" x{number}9", example) == 1.0
