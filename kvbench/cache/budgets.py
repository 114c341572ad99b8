"""How many tokens per KV head each layer of a sequence may hold: the budgets, and the promise that the audit checks."""

from functools import cached_property

from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.policy import Policy, layer_budgets, total_slots
from kvbench.policies.policy_checks import least_budget
from kvbench.policies.selections.pages import Pages

ENDLESS = 1 << 30  # slots that a layer may take if it does not evict


class Budgets:
    """Slots per KV head of each layer: even shares until an allocator has measured the layers.

    The newest prompt has positions `opened` to `prompt` - 1, and its question begins at `question`. Tokens before it
    count as prompt. prompt is 0 before the first call.
    """

    def __init__(self, policy: Policy, layers: int) -> None:
        self._policy = policy
        self._layers = layers
        self.opened = self.prompt = self.question = 0
        self._shares: list[int] = []  # slots of each layer, once they are asked for
        self._statistics: dict[int, list[float]] = {}  # of the layers measured so far
        self._before = [0] * layers  # allowed when the newest prompt began
        self._after: list[int] = []  # allowed after the eviction of the newest prompt, once it is asked for

    def begin(self, opened: int, prompt: int, question: int) -> None:
        """Begin a prompt at position `opened`. Its budgets are computed when it is complete."""
        if opened:
            self._before = self.promise(opened) if self._policy.evicts else self._before
        self.opened, self.prompt, self.question = opened, prompt, question
        self._shares, self._statistics, self._after = [], {}, []

    @property
    def shares(self) -> list[int]:
        """Slots per KV head of each layer. A layer that a cascading allocator has not reached has its even share."""
        if not self._shares:
            asked = self.prompt - self.question
            self._shares = layer_budgets(self._policy, self._layers, self.prompt, asked, self.opened)
        return self._shares

    def within(self, layer: int, tokens: int) -> int:
        """Slots per KV head of a layer after the first `tokens` tokens of a prompt, at least the protected tokens."""
        budget = self.shares[layer]
        share = self._policy.schedule.share(budget, tokens, self.prompt)
        return budget if share == budget else min(budget, max(share, self._least))

    def decoding(self, layer: int, seen: int) -> int:
        """Slots per KV head of a layer after `seen` tokens, the last of which is decoded."""
        return self._policy.schedule.decoded(self.shares[layer], seen, self.prompt)

    @cached_property
    def _least(self) -> int:
        """Slots per KV head for the protected tokens."""
        assert self._policy.scorer is not None
        return least_budget(self._policy.scorer, self._policy.allocator)

    def keep_all(self, layer: int) -> None:
        """Let a layer keep every token from now on. Allocators may have given others the slots that it had left."""
        if self._policy.evicts:
            own, self._shares = self.shares[layer], [*self.shares]
            self._shares[layer] = ENDLESS
            self._after = self._after_prompt()
            self._after[layer] += own

    @property
    def numbers(self) -> dict[str, int]:
        """What parts may read of the sequence (`Needs.reads`), by fields of `SequenceInfo`."""
        return {"prompts": self.prompt, "begins": self.opened, "questions": self.question}

    # --- budgets that are measured on the prompt ---------------------------------------------------------------------
    @property
    def leaves_whole(self) -> bool:
        """Whether an allocator with statistics keeps the whole prompt."""
        allocator = self._policy.allocator
        assert isinstance(allocator, StatisticAllocator)
        return allocator.leaves_whole(self._length, self._total, self._layers, self._least)

    def measured(self, layer: int, statistic: list[float]) -> None:
        """Store the allocator's statistic of one more layer, in any order."""
        self._statistics[layer] = statistic

    def share(self) -> None:
        """Divide the total budget of a prompt that exceeds it among the layers measured so far."""
        allocator, total, measured = self._policy.allocator, self._total, len(self._statistics)
        assert isinstance(allocator, StatisticAllocator)
        statistics = [self._statistics[layer] for layer in range(measured)]
        found = allocator.share(statistics, total, self._layers, self._least, self._length)
        if allocator.exact:
            rest = self._least * (self._layers - measured)
            assert all(self._least <= budget <= self._length for budget in found), "a share must be within its bounds"
            assert sum(found) <= total - rest, "an allocator must not exceed the total"
            assert rest or sum(found) == total, "an allocator must distribute exactly the total"
        self._shares, self._after = found + self.shares[len(found) :], []

    # --- the promise -------------------------------------------------------------------------------------------------
    def promise(self, seen: int) -> list[int]:
        """The most tokens per KV head that each layer may hold after `seen` tokens."""
        schedule = self._policy.schedule
        if seen < self.prompt + schedule.late:
            return self._within_prompt(seen)
        if not self._after:
            self._after = self._after_prompt()
        held, every, tokens = self._after, schedule.every, seen - self.prompt - schedule.late
        if not schedule.returns_to_budget or tokens == 0:
            return [n + tokens for n in held]
        if schedule.decode == "share":
            return [min(n + tokens, self.decoding(layer, seen)) for layer, n in enumerate(held)]
        if isinstance(self._policy.selection, Pages):  # whole pages, of which the newest may be short, leave later
            return [min(n + tokens, b + every - 1) for n, b in zip(held, self._shares, strict=True)]
        return [  # a layer evicts `every` tokens at once, whenever it holds that many beyond its budget
            n + tokens if n + tokens < b + every else b + (tokens - max(1, b + every - n)) % every
            for n, b in zip(held, self._shares, strict=True)
        ]

    def _after_prompt(self) -> list[int]:
        """The most tokens per KV head after the eviction of the newest prompt."""
        length, whole = self._length, 0
        if isinstance(self._policy.allocator, StatisticAllocator):
            # An allocator may leave a prompt beyond the budget whole until decoding evicts.
            whole = length * self.leaves_whole
        new = length - self.opened
        return [max(min(budget, old + new), whole) for budget, old in zip(self.shares, self._before, strict=True)]

    def _within_prompt(self, seen: int) -> list[int]:
        """The most tokens per KV head within a prompt: those left by its last eviction, and all later ones."""
        settled, before = self._policy.schedule.settled(seen - self.opened), self._before
        if settled:
            end = self.opened + settled
            before = [min(self.within(layer, end), end) for layer in range(self._layers)]
        return [held + seen - self.opened - settled for held in before]

    @property
    def _total(self) -> int:
        """Slots per KV head over all layers."""
        return total_slots(self._policy, self._layers, self._length)

    @property
    def _length(self) -> int:
        """Tokens of the sequence when its prompt is evicted."""
        return self.prompt + self._policy.schedule.late
