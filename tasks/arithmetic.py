"""Sums and differences of two numbers hidden in a text: the answer needs both of them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from kvbench.errors import ConfigError, choice, whole_number
from kvbench.tasks.niah import NeedleGrid, Planted
from kvbench.tasks.task import Example, slots
from kvbench.tasks.words import own_words

OPERATIONS = {"sum": "plus", "difference": "minus"}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class Arithmetic(NeedleGrid):
    """`keys` counts between `low` and `high`, hidden like needles; the question adds or subtracts two of them.

    The first operand is at the example's depth, all other counts are anywhere; a difference is never negative.
    operation: "sum", "difference" or "both" (drawn for every example). The score uses the last number of the first
    line that contains one, so "37 + 54 = 91" and "91." are both correct.
    keys: number of counts in a prompt. low, high: the smallest and the largest count. needle: a sentence with slots key
    and value. question, answer_prefix: with slots first, sign and second.
    """

    name: str = "arithmetic"
    chat: bool = True
    keys: int = 8
    low: int = 10
    high: int = 99
    operation: str = "both"
    max_new_tokens: int = 16
    needle: str = "The count of {key} is {value}."
    question: str = "What is the count of {first} {sign} the count of {second}?"
    answer_prefix: str = " The count of {first} {sign} the count of {second} is"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("keys", self.keys, 2)
        whole_number("low", self.low, 0)
        whole_number("high", self.high, self.low + 1)
        choice("operation", self.operation, *OPERATIONS, "both")
        slots("needle", self.needle, ("key", "value"))
        for name in ("question", "answer_prefix"):
            slots(name, getattr(self, name), ("first", "sign", "second"))

    def plant(self, rng: random.Random, text: str) -> Planted:
        """See `NeedleGrid.plant`: different nouns, counts that may be equal."""
        nouns = [noun for noun in own_words().nouns if noun not in text]
        if len(nouns) < self.keys:
            raise ConfigError("keys", self.keys, why=f"is more than the {len(nouns)} nouns that the haystack leaves")
        keys = rng.sample(nouns, self.keys)
        counts = [rng.randint(self.low, self.high) for _ in keys]
        operation = rng.choice(tuple(OPERATIONS)) if self.operation == "both" else self.operation
        if operation == "difference" and counts[0] < counts[1]:
            counts[0], counts[1] = counts[1], counts[0]
        result = counts[0] + counts[1] if operation == "sum" else counts[0] - counts[1]
        values = {"first": keys[0], "sign": OPERATIONS[operation], "second": keys[1]}
        needles = tuple(self.needle.format(key=key, value=count) for key, count in zip(keys, counts, strict=True))
        return Planted(
            needles=needles,
            asked=needles[:2],
            question=self.question.format(**values),
            answer_prefix=self.answer_prefix.format(**values),
            references=(str(result),),
        )

    def score(self, output: str, example: Example) -> float:
        """1 if the last number of the first line with a number is the result, otherwise 0."""
        lines = [numbers for line in output.splitlines() if (numbers := _NUMBER.findall(line))]
        return float(bool(lines) and lines[0][-1] == example.references[0])
