"""The simplest tokenizer that can also decode: one token for every character."""


class CharTokenizer:
    """Ids are code points."""

    def encode(self, text: str) -> list[int]:
        return [ord(mark) for mark in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))
