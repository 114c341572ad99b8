"""Every layer's budget for every sequence of a batch: fixed at the end of its prompt.

Shapes: B batch, L layers.
"""

from collections.abc import Sequence

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.progress import Progress


class Budgets:
    """Slots per KV head of each layer, by sequence; even shares until an allocator's statistics say otherwise."""

    def __init__(self, policy: Policy, layers: int, progress: Progress) -> None:
        self._policy = policy
        self._layers = layers
        self._progress = progress
        self._rows: dict[int, list[int]] = {}
        self._statistics: dict[int, list[list[float]]] = {}

    def row(self, row: int) -> list[int]:
        """Slots per KV head of each layer for one sequence; a share of the prompt needs the prompt's length."""
        if row not in self._rows:
            self._rows[row] = self._policy.layer_budgets(self._layers, self._progress.prompt[row])
        return self._rows[row]

    def of(self, layer: int, rows: Sequence[bool]) -> tuple[int, ...]:
        """One layer's slots per KV head for the sequences of `rows`, 0 for the others.

        Layers a cascade has not reached yet have their even share.
        """
        return tuple(self.row(row)[layer] if needed else 0 for row, needed in enumerate(rows))

    def exceeded(self, rows: Sequence[bool]) -> tuple[bool, ...]:
        """Which of the sequences have a prompt beyond their budget, so that something must be evicted."""
        lengths = [self._length(row) if needed else 0 for row, needed in enumerate(rows)]
        return tuple(length > 0 and not self._policy.leaves_whole(self._layers, length) for length in lengths)

    def measured(self, rows: Sequence[bool], statistic: Tensor) -> None:
        """One more layer's statistic [B,k]; remembered for the sequences of `rows`."""
        for row, values in enumerate(statistic.tolist()):
            if rows[row]:
                self._statistics.setdefault(row, []).append(values)

    def statistics(self, row: int) -> list[list[float]]:
        """What the allocator measured of each layer so far, for one sequence."""
        return self._statistics.get(row, [])

    def share(self, rows: Sequence[bool]) -> None:
        """Share the total out over the layers measured so far, in the sequences of `rows`."""
        for row, needed in enumerate(rows):
            if needed:
                shares = self._policy.shared_budgets(self._statistics[row], self._layers, self._length(row))
                self._rows[row] = shares + self.row(row)[len(shares) :]

    def promise(self, row: int, seen: int) -> list[int]:
        """Tokens per KV head that each layer may hold of a sequence after `seen` tokens."""
        prompt = self._progress.prompt[row]
        if self._policy.schedule.late and prompt is not None and seen <= prompt:
            return [seen] * self._layers
        grown = 0
        if self._policy.schedule.decode == "grow":
            grown = seen if prompt is None else max(0, seen - prompt)
        whole = 0
        if self._policy.allocator.needs_statistics and prompt is not None and (seen <= prompt or grown):
            # An allocator's own gate may leave a prompt beyond the budget whole until decoding evicts.
            whole = prompt * self._policy.leaves_whole(self._layers, prompt)
        return [max(min(budget, seen), whole) + grown for budget in self.row(row)]

    def _length(self, row: int) -> int:
        """Tokens a sequence has when its prompt is evicted."""
        length = self._progress.prompt[row]
        assert length is not None, "the prompt is in, so its length is known"
        return length + self._policy.schedule.late
