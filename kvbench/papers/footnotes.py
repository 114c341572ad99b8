"""Footnotes of a published table: each note once, at the table, a row, a column or the cells it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from string import ascii_lowercase

from kvbench.papers.published import Number

Key = tuple[str, ...]
Place = tuple[Key, Key, Key]  # block, row, column


class Footnotes:
    """Letters for the notes of all numbers, in reading order; what holds for every number has no letter."""

    def __init__(self, cells: Mapping[Place, Number], rows: Sequence[tuple[Key, Key]]) -> None:
        self._of: dict[tuple[str, object], list[str]] = {}
        general = _general(cells)
        self.sentences = [("", _sentence(part)) for part in general]
        segments = _segments(cells, general)
        places: dict[str, list[Place]] = {}
        for row in rows:
            for place in (p for p in cells if p[:2] == row):
                for segment in segments[place]:
                    places.setdefault(segment, []).append(place)
        for number, (note, where) in enumerate(places.items()):
            mark = letter(number)
            self.sentences.append((mark, _sentence(note)))
            for target in _targets(set(where), cells):
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


def _parts(note: str) -> list[str]:
    return note.split("; ") if note else []


def _general(cells: Mapping[Place, Number]) -> list[str]:
    """The parts of the notes that every number has."""
    notes = [_parts(number.note) for number in cells.values()]
    return [part for part in notes[0] if all(part in other for other in notes)] if notes else []


def _segments(cells: Mapping[Place, Number], general: Sequence[str]) -> dict[Place, list[str]]:
    """The notes of every number but the general ones, with those parts apart that are about whole columns or rows."""
    where: dict[str, set[Place]] = {}
    for place, number in cells.items():
        for part in _parts(number.note):
            where.setdefault(part, set()).add(place)
    of_lines = {part for part, places in where.items() if _targets(places, cells)[0][0] != "cell"}
    found = {}
    for place, number in cells.items():
        parts = [part for part in _parts(number.note) if part not in general]
        lines = (part for part in parts if part in of_lines)
        alike = ("; ".join(group) for _, group in groupby(lines, key=lambda part: frozenset(where[part])))
        rest = "; ".join(part for part in parts if part not in of_lines)
        found[place] = [*alike, *([rest] if rest else [])]
    return found


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
