"""Footnotes of a published table: each note once, at the table, a row, a column or the cells it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase

from kvbench.papers.published import Number

Key = tuple[str, ...]
Place = tuple[Key, Key, Key]  # block, row, column


class Footnotes:
    """Letters for notes, parts of them about the same numbers together; what holds for every number has no letter."""

    def __init__(self, cells: Mapping[Place, Number], rows: Sequence[tuple[Key, Key]]) -> None:
        self._of: dict[tuple[str, object], list[str]] = {}
        where: dict[str, list[Place]] = {}
        for row in rows:
            for place in (p for p in cells if p[:2] == row):
                for part in filter(None, cells[place].note.split("; ")):
                    where.setdefault(part, []).append(place)
        general = [part for part, places in where.items() if len(places) == len(cells)]
        self.sentences = [("", _sentence(part)) for part in general]
        together: dict[tuple[Place, ...], list[str]] = {}
        for part in where:
            if part not in general:
                together.setdefault(tuple(where[part]), []).append(part)
        for number, (places, parts) in enumerate(together.items()):
            mark = letter(number)
            self.sentences.append((mark, _sentence("; ".join(parts))))
            for target in _targets(set(places), cells):
                self._of.setdefault(target, []).append(mark)

    def of_cell(self, place: Place) -> tuple[str, ...]:
        """Letters of a single number."""
        return tuple(self._of.get(("cell", place), ()))

    def of_row(self, block: Key, row: Key) -> tuple[str, ...]:
        """Letters of a whole row of a block."""
        return tuple(self._of.get(("row", (block, row)), ()))

    def of_column(self, column: Key) -> tuple[str, ...]:
        """Letters of a whole column."""
        return tuple(self._of.get(("column", column), ()))


def _targets(where: set[Place], cells: Mapping[Place, Number]) -> list[tuple[str, object]]:
    """Whole columns if the note covers all of each column it is in, else whole rows likewise, else cell by cell."""
    columns = list(dict.fromkeys(place[2] for place in cells if place in where))
    if where == {place for place in cells if place[2] in columns}:
        return [("column", column) for column in columns]
    rows = list(dict.fromkeys(place[:2] for place in cells if place in where))
    if where == {place for place in cells if place[:2] in rows}:
        return [("row", row) for row in rows]
    return [("cell", place) for place in where]


def letter(number: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    rest, last = divmod(number, len(ascii_lowercase))
    return (letter(rest - 1) if rest else "") + ascii_lowercase[last]


def _sentence(words: str) -> str:
    return words if words.endswith(".") else f"{words}."
