from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvbench.errors import number, whole_number
from kvbench.tasks.scores import contains, contains_any, needle_words, rouge1_recall
from kvbench.tasks.task import Example, Task, Tokenizer

SANDWICH = ("eat a sandwich and sit in Dolores Park on a sunny day.",)


@dataclass(frozen=True, kw_only=True)
class Nothing(Task):
    """The smallest task there can be."""

    name: str = "nothing"

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        yield from ()

    def score(self, output: str, example: Example) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"truncation": "right"}, "truncation must be refuse, middle or left, got 'right'"),
        ({"stop": [""]}, r"stop=\(''.*\) is not allowed"),
        ({"end_texts": "\n"}, r"end_texts='\\n' is not allowed"),
    ],
)
def test_a_wrong_field_is_refused_with_its_name_and_value(fields: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Nothing(**fields)


@pytest.mark.parametrize("value", [0, True, 1.0, "3", None])
def test_a_count_is_an_integer_of_at_least_its_lower_end(value: object) -> None:
    with pytest.raises(ValueError, match=r"keys must be a whole number of at least 1"):
        whole_number("keys", value, 1)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), "0.5", None, True])
def test_a_share_lies_between_its_ends(value: object) -> None:
    with pytest.raises(ValueError, match=r"depths must be a number from 0 to 1"):
        number("depths", value, 0, 1)


def test_contains_is_the_share_of_references_in_the_output_whatever_their_case() -> None:
    assert contains("ABC and 12", ("abc", "12", "x", "y")) == 0.5
    assert contains_any("ABC and 12", ("x", "12")) == 1.0
    assert contains_any("ABC and 12", ("x", "y")) == 0.0


@pytest.mark.parametrize(
    ("output", "score"),
    [  # the eleven words: eat a sandwich and sit in dolores park on sunny day.
        ("Eat a sandwich and sit in Dolores Park on a sunny day.", 1.0),
        ("eat a sandwich and sit in dolores park on a sunny day", 10 / 11),  # "day" without its full stop is a miss
        ("sandwich sandwich", 1 / 11),
        ("go to the zoo", 0.0),
        ("", 0.0),
    ],
)
def test_needle_words_counts_distinct_words_with_their_punctuation(output: str, score: float) -> None:
    assert needle_words(output, SANDWICH) == pytest.approx(score)


@pytest.mark.parametrize(
    ("output", "score"),
    [  # twelve words, "a" twice; stemming makes "sandwiches" a sandwich
        (SANDWICH[0], 1.0),
        ("eat sandwiches", 2 / 12),
        ("a a a", 2 / 12),
        ("nothing", 0.0),
    ],
)
def test_rouge1_recall_counts_stemmed_words_as_often_as_they_stand(output: str, score: float) -> None:
    assert rouge1_recall(output, SANDWICH) == pytest.approx(score)


def test_building_tasks_imports_no_evaluation_harness_and_no_stemmer() -> None:
    code = (
        "import sys, kvbench.tasks.niah, kvbench.tasks.suite, kvbench.tasks.ruler.niah, kvbench.tasks.longbench.task, "
        "kvbench.tasks.summary; heavy = ('lm_eval', 'nltk', 'rouge_score', 'wonderwords', 'jieba', 'huggingface_hub'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
