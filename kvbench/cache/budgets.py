"""Every layer's budget for every sequence of a batch: fixed at the end of its prompt.

Shapes: B batch, L layers.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from types import MappingProxyType

from torch import Tensor

from kvbench.cache.steps import Progress
from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.layer_budgets import layer_budgets, leaves_whole, shared_budgets
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import least_budget


class Budgets:
    """Slots per KV head of each layer, by sequence; even shares until an allocator's statistics say otherwise."""

    _policies: Mapping[int, Policy] = MappingProxyType({})  # where sequences decode together under several budgets

    def __init__(self, policy: Policy, layers: int, progress: Progress) -> None:
        self._policy = policy
        self._layers = layers
        self._progress = progress
        self._rows: dict[int, list[int]] = {}
        self._statistics: dict[int, list[list[float]]] = {}
        self._before: dict[int, list[int]] = {}  # promised when the newest prompt was opened

    def promised(self) -> dict[int, list[int]]:
        """What every sequence is promised now."""
        return {row: self.promise(row, seen) for row, seen in enumerate(self._progress.seen)}

    def reopen(self, before: dict[int, list[int]]) -> None:
        """Another prompt was opened on what was promised `before`: at its end budgets are settled anew."""
        self._before = before
        self._rows.clear()
        self._statistics.clear()

    def policy(self, row: int) -> Policy:
        """The policy of a sequence: its budget is its own."""
        return self._policies.get(row, self._policy)

    @staticmethod
    def of_rows(rows: Sequence[tuple["Budgets", int]], progress: Progress) -> "Budgets":
        """The budgets of sequences that come from elsewhere, under policies that differ in the budget alone."""
        policies = [part.policy(row) for part, row in rows]
        found = Budgets(policies[0], rows[0][0]._layers, progress)
        if any(policy is not policies[0] for policy in policies):
            found._policies = dict(enumerate(policies))
        for index, (part, row) in enumerate(rows):
            for name in ("_rows", "_statistics", "_before"):
                known = getattr(part, name)
                if row in known:
                    getattr(found, name)[index] = known[row]
        return found

    def row(self, row: int) -> list[int]:
        """Slots per KV head of each layer for one sequence; what was seen before its newest prompt counts as prompt."""
        if row not in self._rows:
            policy, prompt = self.policy(row), self._progress.prompt[row]
            self._rows[row] = layer_budgets(policy, self._layers, prompt, prompt - self._progress.question[row])
        return self._rows[row]

    def of(
        self, layer: int, rows: Sequence[bool], first: int = 0, read: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """One layer's slots per KV head for the sequences of `rows`, from the `first` on; 0 for the others.

        read: tokens of each that were read; None: all of its prompt. Layers a cascade has not reached yet have their
        even share.
        """
        found = [self.row(row)[layer] if needed else 0 for row, needed in enumerate(rows, first)]
        if read is not None:
            found = [self._share(row, n, seen) for row, n, seen in zip(count(first), found, read, strict=False)]
        return tuple(found)

    def _share(self, row: int, budget: int, read: int) -> int:
        """What may be held of a layer's budget after `read` tokens; never fewer than what always stays."""
        share = self._policy.schedule.share(budget, read, self._progress.prompt[row])
        return budget if share == budget else min(budget, max(share, self._least))

    @cached_property
    def _least(self) -> int:
        """Slots per KV head that are always kept."""
        assert self._policy.scorer is not None
        return least_budget(self._policy.scorer, self._policy.allocator)

    def exceeded(self, rows: Sequence[bool]) -> tuple[bool, ...]:
        """Which of the sequences have a prompt beyond their budget, so that something must be evicted."""
        lengths = [self._length(row) if needed else 0 for row, needed in enumerate(rows)]
        return tuple(
            length > 0 and not leaves_whole(self.policy(row), self._layers, length)
            for row, length in enumerate(lengths)
        )

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
                shares = shared_budgets(self.policy(row), self._statistics[row], self._layers, self._length(row))
                self._rows[row] = shares + self.row(row)[len(shares) :]

    def promise(self, row: int, seen: int) -> list[int]:
        """Tokens per KV head that each layer may hold of a sequence after `seen` tokens."""
        schedule, prompt = self._policy.schedule, self._progress.prompt[row]
        if seen < prompt or (schedule.late and seen == prompt):
            return self._while_coming_in(row, seen)
        held, budgets, every = self._after_prompt(row), self.row(row), schedule.every
        tokens = seen - self._length(row)
        if schedule.decode == "grow" or tokens == 0:
            return [n + tokens for n in held]
        return [  # once `every` tokens are held beyond the budget they go, and so again
            n + tokens if n + tokens < b + every else b + (tokens - max(1, b + every - n)) % every
            for n, b in zip(held, budgets, strict=True)
        ]

    def _after_prompt(self, row: int) -> list[int]:
        """The same at the end of its newest prompt."""
        length, whole = self._length(row), 0
        if isinstance(self._policy.allocator, StatisticAllocator):
            # An allocator's own gate may leave a prompt beyond the budget whole until decoding evicts.
            whole = length * leaves_whole(self.policy(row), self._layers, length)
        before, new = self._before.get(row, [0] * self._layers), length - self._progress.opened[row]
        return [max(min(budget, old + new), whole) for budget, old in zip(self.row(row), before, strict=True)]

    def _while_coming_in(self, row: int, seen: int) -> list[int]:
        """The same inside a prompt: what was there at its last eviction, and everything that came since."""
        opened = self._progress.opened[row]
        settled = self._policy.schedule.settled(seen - opened)
        before = self._before.get(row, [0] * self._layers)
        if settled:
            read = opened + settled
            before = [min(self._share(row, budget, read), read) for budget in self.row(row)]
        return [held + seen - opened - settled for held in before]

    def _length(self, row: int) -> int:
        """Tokens a sequence has when its prompt is evicted."""
        return self._progress.prompt[row] + self._policy.schedule.late
