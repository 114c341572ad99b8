"""Tests of the phone book."""

from typing import Any

from phonebook import PhoneBook


def examples(book: PhoneBook, limit: int) -> list[Any]:
    return list(book.examples(tokenizer=None, seed=0, limit=limit))  # type: ignore[arg-type] # unused


def test_the_answer_occurs_once_and_scores_one() -> None:
    (example,) = examples(PhoneBook(entries=5), limit=1)
    (number,) = example.references
    assert example.prompt.count(number) == 1
    assert PhoneBook().score(f" {number}.", example) == 1.0
    assert PhoneBook().score(" 12.", example) == 0.0


def test_a_larger_limit_continues_a_run() -> None:
    assert examples(PhoneBook(), limit=3)[:2] == examples(PhoneBook(), limit=2)
