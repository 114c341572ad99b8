"""Tokenizers that split text in very different ways: generators must be true to whichever they are given."""

import re
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class PatternTokenizer:
    """One token for every match of a pattern; ids are the position of the piece in what was seen so far."""

    pattern: str

    def encode(self, text: str) -> list[int]:
        return [hash(piece) for piece in re.findall(self.pattern, text)]

    def decode(self, ids: list[int]) -> str:
        raise NotImplementedError("generators only count")


PATTERNS = {
    "words": r"\S+",
    "characters": r"(?s).",
    "pieces": r"\d{1,3}| ?[A-Za-z]{1,4}|\s|[^\sA-Za-z\d]",
    "bytes in pairs": r"(?s)..?",
}


@pytest.fixture(params=list(PATTERNS.values()), ids=list(PATTERNS), scope="session")
def tokenizer(request: pytest.FixtureRequest) -> PatternTokenizer:
    """Every tokenizer in turn."""
    return PatternTokenizer(request.param)


@pytest.fixture(scope="session")
def words() -> PatternTokenizer:
    """`str.split`: the tokenizer behind the golden prompts."""
    return PatternTokenizer(PATTERNS["words"])


@pytest.fixture(scope="session")
def pieces() -> PatternTokenizer:
    """Something like a real tokenizer: digits by three, words in pieces."""
    return PatternTokenizer(PATTERNS["pieces"])
