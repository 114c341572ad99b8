"""Evictions that are due: after which step of which layer, and by how much."""

from dataclasses import dataclass
from functools import cached_property

from kvbench.cache.group import PolicyGroup
from kvbench.cache.state import LayerState
from kvbench.cache.step import LayerStep
from kvbench.policies.observation import Phase
from kvbench.policies.policy import Policy
from kvbench.policies.stores.batch import BatchStore
from kvbench.policies.stores.dense import DenseStore
from kvbench.policies.stores.store import LayerStore


@dataclass(frozen=True, eq=False)
class Pending:
    """A layer step after which sequences may hold more than their budget."""

    group: PolicyGroup
    layer: LayerState
    step: LayerStep

    @property
    def policy(self) -> Policy:
        return self.group.policy

    @property
    def store(self) -> LayerStore:
        return self.step.store

    @property
    def phase(self) -> Phase:
        return self.step.now.phase

    @cached_property
    def excess(self) -> list[int]:
        """Tokens per KV head to evict, for each sequence: those beyond the budget, 0 where it is not its turn."""
        due, counts, budgets = self.step.now.evicts, self.layer.counts[self.step.rows], self.step.observation.budgets
        excess = [n - b if now else 0 for now, n, b in zip(due, counts, budgets, strict=True)]
        every = self.policy.schedule.every
        return excess if every == 1 or self.phase != "decode" else [n if n >= every else 0 for n in excess]

    @property
    def over(self) -> tuple[bool, ...]:
        """Which of the sequences evict."""
        return tuple(n > 0 for n in self.excess)

    @property
    def in_place(self) -> bool:
        """Whether an evicted token leaves its slot to the next: while decoding, and in a prompt's blocks of one.

        A prompt's first eviction compacts, and so does every one that deals out a layer's slots anew, or after which
        the layer grows.
        """
        if self.phase == "decode":
            return True
        policy, held = self.policy, self.layer.store
        compacted = isinstance(held, BatchStore) or (isinstance(held, DenseStore) and held.evicted)
        return compacted and not policy.allocator.per_head and layers_alike(policy)

    @property
    def as_batch(self) -> bool:
        """Whether it may be evicted with other layers: one token, decoded or a block, in every sequence.

        In a prompt only where the layer is at its size already: until then it may hold much more than its budget.
        """
        step, policy = self.step, self.policy
        one = step.alone and step.now.aligned and step.queries.shape[2] == 1
        return one and isinstance(self.layer.store, DenseStore | BatchStore) and layers_alike(policy) and self.in_place


def layers_alike(policy: Policy) -> bool:
    """Whether all layers may be rows of one batch when each evicts a token after a decoded one."""
    return policy.evicts and policy.schedule.one_each and not (policy.needs.kept or policy.needs.layer)
