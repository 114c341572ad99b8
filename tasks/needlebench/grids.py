"""The released configurations: lengths, depths, and the number of tokens left free."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("single_retrieval", "multi_retrieval", "multi_reasoning")
LANGUAGES = ("en", "zh")
REPEATS = {"single_retrieval": 10, "multi_retrieval": 25, "multi_reasoning": 10}
NEEDLES = (2, 3, 4, 5)  # of the four runs of multi reasoning
SPACING = 10  # percent of the haystack from one needle of multi reasoning to the next

_TWENTY = tuple(100 * step // 19 for step in range(20))
_ELEVEN = (0, 10, 21, 31, 42, 52, 63, 73, 84, 94, 100)
_TENTHS = tuple(range(0, 101, 10))
_CHINESE = 200


@dataclass(frozen=True)
class Grid:
    """Lengths in GPT-4 tokens, depths in percent, and the English buffers by sub-task: tokens left free."""

    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    english: tuple[int, int, int]

    def buffer(self, kind: str, language: str) -> int:
        """Tokens of `length` that are not filled by haystack and needles."""
        return self.english[KINDS.index(kind)] if language == "en" else _CHINESE


V1 = {
    "4k": Grid((1000, 2000, 3000, 4000), _TWENTY, (600, 1000, 600)),
    "8k": Grid((5000, 6000, 7000, 8000), _TWENTY, (800, 1300, 1000)),
    "32k": Grid((9000, 13000, 17000, 21000, 25000, 29000, 31000, 32000), _ELEVEN, (3000, 3000, 3000)),
}
V2 = {
    "4k": Grid((1000, 2000, 3000, 4000), _TENTHS, (500, 500, 500)),
    "8k": Grid(tuple(range(1000, 8001, 1000)), _TENTHS, (500, 500, 500)),
    "32k": Grid((1000, *range(4000, 32001, 4000)), _TENTHS, (3000, 3000, 3000)),
}
SIZES = tuple(V1)


def spread(count: int, lengths: tuple[int, ...], depths: tuple[int, ...]) -> list[tuple[int, int]]:
    """`count` cells (length, depth), evenly spaced over the grid in order of length, including the first and the last.

    If the step is not a multiple of the number of depths, the depths vary from length to length.
    """
    cells = [(length, depth) for length in lengths for depth in depths]
    if count >= len(cells):
        return cells
    if count == 1:
        return [cells[len(cells) // 2]]
    return [cells[index * (len(cells) - 1) // (count - 1)] for index in range(count)]
