"""The tables of a cache, one for each format of stores, and the rows of a decoding step that each of them has.

Shapes: R rows of a call, P rows of a table, H_q query heads, H_kv KV heads, D head dim.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kvbench.cache.joining import can_join
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.table import Table
from kvbench.policies.observation import AttentionParams


class Tables:
    """sequences: those of the cache, in the order of its rows. rows: the sequence of each row of the next step, if
    `begin_step` arranged them; None: padding. alone: rows of the running step whose sequences are in no table.
    """

    def __init__(self, sequences: list[CachedSequence]) -> None:
        self._sequences = sequences
        self._tables: list[Table] = []
        self._held: list[tuple[Table, slice | Tensor | None]] = []  # with their rows of the running step; None: all
        self.rows: list[CachedSequence | None] = []
        self.alone: list[tuple[int, CachedSequence]] = []

    @property
    def running(self) -> bool:
        """Whether the running call is a step of tables."""
        return bool(self._held)

    @property
    def recordable(self) -> bool:
        """Whether the step that begins depends on nothing but the tokens, and changes only tensors on the device."""
        return all(sequence.table is not None for sequence in self._sequences)

    @property
    def version(self) -> tuple[object, ...]:
        """Changes when a recorded step is not valid any more."""
        return tuple((id(table), table.version) for table in self._tables)

    @property
    def positions(self) -> Tensor:
        """Positions of the next tokens [R,1], which follow those of a step on the device, if all are in tables."""
        parts = [table.positions for table in self._tables]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def count(self, steps: int) -> None:
        """Count steps that the device took; negative to undo."""
        for table in self._tables:
            table.count(steps)

    def enter(self, pads: bool = False) -> None:
        """Let all sequences that decode alike enter tables. pads: rows may be padding, for steps that are recorded."""
        self._tables = [table for table in self._tables if table.rows]
        inside = [one for one in self._sequences if one.table is not None]
        leave_tables([one for one in inside if one.table not in self._tables or one.table.evicts_next(one)])
        waiting = [one for one in self._sequences if one.table is None and can_join(one)]
        for table in self._tables:
            table.admit(waiting)
            waiting = [one for one in waiting if one.table is None]
        while waiting:
            table = Table(pads)
            table.admit(waiting)
            waiting = [one for one in waiting if one.table is None]
            self._tables.append(table)

    def arrange(self, pads: bool) -> list[CachedSequence | None]:
        """Before a step: the sequence of each row, table by table; None: padding."""
        self.enter(pads)
        alone = [sequence for sequence in self._sequences if sequence.table is None]
        self.rows = [*(row for table in self._tables for row in table.rows), *alone]
        self._sequences[:] = [sequence for sequence in self.rows if sequence is not None]
        return self.rows

    def begin(self, device: torch.device) -> None:
        """Begin a call: find the rows of each table, and those of sequences without one."""
        order: Sequence[CachedSequence | None] = self.rows or list(self._sequences)
        row_of = {sequence: row for row, sequence in enumerate(order) if sequence is not None}
        first, self._held = 0, []
        for table in self._tables if any(one.table is not None for one in self._sequences) else ():
            own = table.rows
            rows = list(range(first, first + len(own)))  # table by table, padding included
            first += len(own)
            if not self.rows:
                rows = [row_of[sequence] for sequence in own if sequence is not None]
            if rows == list(range(rows[0], rows[0] + len(rows))):
                self._held.append((table, None if len(rows) == len(order) else slice(rows[0], rows[-1] + 1)))
            else:
                self._held.append((table, torch.tensor(rows, device=device)))
        self.alone = [(row_of[one], one) for one in self._sequences if one.table is None] if self._held else []

    def attend(self, index: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        """Attention [R,H_q,1,D] of the newest queries [R,H_q,1,D], whose keys and values [R,H_kv,1,D] are appended.

        The rows of sequences without a table are left to the caller.
        """
        return self._each(lambda table, *new: table.attend(index, *new, params), queries, keys, values)

    def read(self, index: int, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attention of another layer's queries [R,H_q,1,D] to the tokens of a layer that has attended; see `attend`."""
        return self._each(lambda table, own: table.read(index, own, params), queries)

    def _each(self, attend: Callable[..., Tensor], *new: Tensor) -> Tensor:
        """The attention of every table, for its rows [P,...] of new tensors [R,...]; 0 in other rows."""
        out: Tensor | None = None
        for table, rows in self._held:
            found = attend(table, *(x if rows is None else x[rows] for x in new))
            if rows is None:
                return found
            out = found.new_zeros(len(new[0]), *found.shape[1:]) if out is None else out
            out[rows] = found
        assert out is not None, "a sequence is in a table"
        return out

    def end_steps(self) -> None:
        """Carry out the evictions of tables that have attended."""
        for table in self._tables:
            table.end_call()

    def end(self) -> None:
        """End a call."""
        self.end_steps()
        self.rows, self._held = [], []


def leave_tables(sequences: Iterable[CachedSequence]) -> None:
    """Give sequences that decode in tables their layers back."""
    leaving = [sequence for sequence in sequences if sequence.table is not None]
    for table in {id(one.table): one.table for one in leaving if one.table is not None}.values():
        own = [sequence for sequence in leaving if sequence.table is table]
        if table.is_tight and len(own) == sum(row is not None for row in table.rows):
            table.free_all()
        for sequence in own:
            if sequence.table is not None:
                table.free(sequence)
