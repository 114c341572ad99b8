"""Sums and differences over looked-up numbers."""

import re

import pytest
from char_tokenizer import CharTokenizer

from kvbench.tasks.arithmetic import Arithmetic
from kvbench.tasks.task import Example

TASK = Arithmetic(lengths=(900,))


def examples(task: Arithmetic = TASK, seed: int = 0) -> list[Example]:
    return list(task.examples(CharTokenizer(), seed, 20))


def said(text: str, key: str) -> int:
    (count,) = re.findall(rf"The count of {key} is (\d+)\.", text)
    return int(count)


def test_the_reference_is_what_the_two_counts_in_the_text_make() -> None:
    signs = set()
    for example in examples():
        first, sign, second = re.findall(r"What is the count of (\w+) (\w+) the count of (\w+)\?", example.prompt)[0]
        a, b = said(example.prompt, first), said(example.prompt, second)
        assert 10 <= a <= 99
        assert 10 <= b <= 99
        assert example.references == (str(a + b if sign == "plus" else a - b),)
        assert int(example.references[0]) >= 0
        assert example.answer_prefix == f" The count of {first} {sign} the count of {second} is"
        signs.add(sign)
    assert signs == {"plus", "minus"}


def test_the_first_operand_stands_at_the_depth_of_the_cell() -> None:
    found = examples(Arithmetic(lengths=(1500,), repeats=1))
    for example, end in ((found[0], 0), (found[-1], 1)):
        first = re.findall(r"What is the count of (\w+)", example.prompt)[0]
        context = example.prompt.split("\n\n")[1]
        place = context.index(f"The count of {first} is") / len(context)
        assert abs(place - end) < 0.2


@pytest.mark.parametrize(
    ("output", "score"),
    [
        (" 91.", 1.0),
        (" 37 + 54 = 91", 1.0),
        ("\n 37 + 54 = 91\nThe count of 8", 1.0),
        (" 191", 0.0),
        (" 91 - 54 = 37", 0.0),
        (" none", 0.0),
    ],
)
def test_the_last_number_of_the_first_line_with_one_is_the_answer(output: str, score: float) -> None:
    example = Example(index=0, prompt="", references=("91",), max_new_tokens=16)
    assert TASK.score(output, example) == score
