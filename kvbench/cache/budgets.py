"""The budget of every layer and sequence of a batch, and the number of tokens that each layer may hold.

Shapes: B batch, L layers.
"""

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from kvbench.cache.steps import Progress
from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.layer_budgets import layer_budgets, leaves_whole, shared_budgets
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import least_budget


class Budgets:
    """Slots per KV head of each layer, by sequence: even shares until an allocator has measured the layers."""

    def __init__(self, policy: Policy, layers: int, progress: Progress) -> None:
        self._policy = policy
        self._layers = layers
        self._progress = progress
        self._rows: dict[int, list[int]] = {}
        self._statistics: dict[int, list[list[float]]] = {}
        self._before: dict[int, list[int]] = {}  # allowed when the newest prompt began

    def promised(self) -> dict[int, list[int]]:
        """The most tokens per KV head that each layer may hold now, by sequence."""
        return {row: self.promise(row, seen) for row, seen in enumerate(self._progress.seen) if self._policy.evicts}

    def reopen(self, before: dict[int, list[int]]) -> None:
        """Begin another prompt after the tokens promised `before`. Its budgets are computed when it is complete."""
        self._before = before
        self._rows.clear()
        self._statistics.clear()

    def row(self, row: int) -> list[int]:
        """Slots per KV head of each layer for one sequence. Tokens before its newest prompt count as prompt."""
        if row not in self._rows:
            prompt = self._progress.prompt[row]
            self._rows[row] = layer_budgets(self._policy, self._layers, prompt, prompt - self._progress.question[row])
        return self._rows[row]

    def of(self, layer: int, rows: Sequence[bool], read: Sequence[int] | None = None) -> tuple[int, ...]:
        """One layer's slots per KV head for the sequences selected by `rows`, 0 for the others.

        read: number of tokens of each sequence so far; None: its whole prompt. A layer that a cascading allocator has
        not reached has its even share.
        """
        found = [self.row(row)[layer] if selected else 0 for row, selected in enumerate(rows)]
        if read is not None:
            found = [self._share(row, n, seen) for row, (n, seen) in enumerate(zip(found, read, strict=True))]
        return tuple(found)

    def _share(self, row: int, budget: int, read: int) -> int:
        """The part of a layer's budget for the first `read` tokens of a prompt, at least the protected tokens."""
        share = self._policy.schedule.share(budget, read, self._progress.prompt[row])
        return budget if share == budget else min(budget, max(share, self._least))

    @cached_property
    def _least(self) -> int:
        """Slots per KV head for the protected tokens."""
        assert self._policy.scorer is not None
        return least_budget(self._policy.scorer, self._policy.allocator)

    def exceeded(self, rows: Sequence[bool]) -> tuple[bool, ...]:
        """Which of the selected sequences have a prompt that is longer than their budget."""
        lengths = [self._length(row) if selected else 0 for row, selected in enumerate(rows)]
        return tuple(length > 0 and not leaves_whole(self._policy, self._layers, length) for length in lengths)

    def measured(self, rows: Sequence[bool], statistic: Tensor) -> None:
        """Store the allocator's statistic [B,k] of one more layer, for the selected sequences."""
        for row, values in enumerate(statistic.tolist()):
            if rows[row]:
                self._statistics.setdefault(row, []).append(values)

    def share(self, rows: Sequence[bool]) -> None:
        """Divide the total budget among the layers measured so far, in the selected sequences."""
        for row, selected in enumerate(rows):
            if selected:
                shares = shared_budgets(self._policy, self._statistics[row], self._layers, self._length(row))
                self._rows[row] = shares + self.row(row)[len(shares) :]

    def promise(self, row: int, seen: int) -> list[int]:
        """The most tokens per KV head that each layer may hold of a sequence after `seen` tokens."""
        schedule, prompt = self._policy.schedule, self._progress.prompt[row]
        if seen < prompt or (schedule.late and seen == prompt):
            return self._within_prompt(row, seen)
        held, budgets, every = self._after_prompt(row), self.row(row), schedule.every
        tokens = seen - self._length(row)
        if schedule.decode == "grow" or tokens == 0:
            return [n + tokens for n in held]
        return [  # a layer evicts `every` tokens at once, whenever it holds that many beyond its budget
            n + tokens if n + tokens < b + every else b + (tokens - max(1, b + every - n)) % every
            for n, b in zip(held, budgets, strict=True)
        ]

    def _after_prompt(self, row: int) -> list[int]:
        """The most tokens per KV head after the eviction of the newest prompt."""
        length, whole = self._length(row), 0
        if isinstance(self._policy.allocator, StatisticAllocator):
            # An allocator may leave a prompt beyond the budget whole until decoding evicts.
            whole = length * leaves_whole(self._policy, self._layers, length)
        before, new = self._before.get(row, [0] * self._layers), length - self._progress.opened[row]
        return [max(min(budget, old + new), whole) for budget, old in zip(self.row(row), before, strict=True)]

    def _within_prompt(self, row: int, seen: int) -> list[int]:
        """The most tokens per KV head within a prompt: those left by its last eviction, and all later ones."""
        opened = self._progress.opened[row]
        settled = self._policy.schedule.settled(seen - opened)
        before = self._before.get(row, [0] * self._layers)
        if settled:
            read = opened + settled
            before = [min(self._share(row, budget, read), read) for budget in self.row(row)]
        return [held + seen - opened - settled for held in before]

    def _length(self, row: int) -> int:
        """Tokens of a sequence when its prompt is evicted."""
        return self._progress.prompt[row] + self._policy.schedule.late
