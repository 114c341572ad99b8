"""Tests of the phone book."""

from typing import Any

from phonebook import PhoneBook


def drawn(book: PhoneBook, limit: int) -> list[Any]:
    return list(book.examples(tokenizer=None, seed=0, limit=limit))  # type: ignore[arg-type] # it needs none


def test_the_answer_stands_in_the_book_once_and_scores_one() -> None:
    (example,) = drawn(PhoneBook(entries=5), limit=1)
    (number,) = example.references
    assert example.prompt.count(number) == 1
    assert PhoneBook().score(f" {number}.", example) == 1.0
    assert PhoneBook().score(" 12.", example) == 0.0


def test_a_larger_limit_continues_a_run() -> None:
    assert drawn(PhoneBook(), limit=3)[:2] == drawn(PhoneBook(), limit=2)
