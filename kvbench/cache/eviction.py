"""How one layer goes back to its budget: what it holds is scored, one token or many go, and may leave a trace.

Shapes: B batch, H_kv KV heads, T slots.
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from kvbench.cache.evidence import ALL, Evidence
from kvbench.cache.recent_queries import RecentQueries
from kvbench.cache.whole import Whole
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Eviction, Merged, MergeState, OneEviction, Vectors
from kvbench.policies.observation import Observation, Phase
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.store import Held


class EvictingLayer:
    """What one layer holds, and every way in which it gives tokens up. When it does, the cache's queue decides."""

    def __init__(self, cache: Whole, index: int) -> None:
        self._cache = ref(cache)
        self.index = index
        self.policy = cache.policy
        self.counts: list[int] = []  # tokens held per KV head, for each sequence
        self.memory: MergeState = {}
        self.ranking: Ranking | None = None  # of a prompt whose share is not settled yet
        self.unsettled = False  # a prompt is in, and its eviction is still to come
        self.recent = RecentQueries(cache.policy.queries_needed)
        self._held: Held | None = None

    @property
    def cache(self) -> Whole:
        """The cache whose layer it is. References both ways would keep their memory until garbage is looked for."""
        cache = self._cache()
        assert cache is not None, "a layer is used by its cache alone"
        return cache

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a cache has layers that are its own."""
        return {**self.__dict__, "_cache": self.cache}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_cache": ref(state["_cache"])}

    @property
    def held(self) -> Held:
        assert self._held is not None, "the layer holds nothing yet"
        return self._held

    def observe(self, shown: Evidence) -> None:
        """Let the scorer take a step into its running statistics."""
        assert self.policy.scorer is not None
        if not self.policy.scorer.observes:
            return
        state = shown.held.state
        self.policy.scorer.observe(shown.observation, state)
        shown.held.remember(state)

    def excess(self, shown: Evidence) -> list[int]:
        """Tokens per KV head beyond the budget, for each sequence; 0 where it is not that sequence's turn."""
        due, budgets = shown.now.evicts, shown.observation.budgets
        return [n - b if now else 0 for now, n, b in zip(due, self.counts[shown.rows], budgets, strict=True)]

    def shrink(self, shown: Evidence) -> None:
        """Evict down to the budget in every sequence whose turn it is."""
        excess, now = self.excess(shown), shown.now
        if max(excess) <= 0:
            return
        policy, observation = self.policy, shown.observation
        over = tuple(n > 0 for n in excess)
        assert shown.rows is ALL, "sequences of several lengths give up a token each"
        self.give_back(shown, excess)
        ranking = self.rank(observation)
        if max(excess) == 1 and self.replaces(now.phase):
            kept = self._give_up_one(ranking, over, now.phase)
        else:
            kept = self.shrink_to(ranking, observation.budgets, over, now.phase)
            kept = kept if now.phase != "decode" else None
        if kept is not None and policy.scorer is not None:
            policy.scorer.selected(observation, kept)

    def rank(self, observation: Observation) -> Ranking:
        """What every token held is worth; of all sequences."""
        ranking = self.policy.rank(observation, self.held.state)
        self.cache.note_broken(self.index, ranking.broken())
        return ranking

    def replaces(self, phase: Phase) -> bool:
        """Whether one token too many leaves its slot to the next: while decoding, and in a prompt's blocks of one.

        A prompt's first eviction compacts, and so does every one that deals out a layer's slots anew, or after which
        the layer grows.
        """
        if phase == "decode":
            return True
        policy, held = self.policy, self.held
        return held.evicted and not policy.allocator.per_head and policy.gives_up_together and held.side_by_side

    def give_back(self, shown: Evidence, excess: Sequence[int]) -> None:
        """Count those tokens as gone."""
        counts = self.counts[shown.rows]
        self.counts[shown.rows] = [count - max(n, 0) for count, n in zip(counts, excess, strict=True)]

    def _give_up_one(self, ranking: Ranking, rows: Sequence[bool], phase: Phase) -> Tensor | None:
        """Evict one token per KV head of the chosen sequences, in place.

        Returns the slots that stayed, bool [B,H_kv,T], where the scorer wants to be told.
        """
        policy, held = self.policy, self.held
        victims = ranking.victim()
        going = None if all(rows) else on_device(tuple(rows), victims.device)[:, None, None]
        if policy.merger.merges:
            view = self.index, phase, Vectors([held.keys]), Vectors([held.values]), held.positions, held.state
            one = OneEviction(*view, victims, going, ranking.packed)
            self.write(policy.merger.absorb_one(one, self.memory))
        kept = None
        if policy.scorer is not None and policy.scorer.looks_back:
            gone = on_device(tuple(rows), victims.device)[:, None, None].expand_as(victims)
            kept = ranking.occupied.scatter(-1, victims, ~gone)
        held.release(victims, None if all(rows) else rows)
        return kept

    def shrink_to(self, ranking: Ranking, budgets: Sequence[int], rows: Sequence[bool], phase: Phase) -> Tensor:
        """Evict to the budgets in the chosen sequences and return the slots that stayed, bool [B,H_kv,T]."""
        policy, held = self.policy, self.held
        per_head = policy.allocator.heads(self.index, ranking, budgets)
        counts: Tensor | int | None = per_head
        if counts is None:
            same = len(set(budgets)) == 1
            counts = budgets[0] if same else ranking.seen.new_tensor(budgets)[:, None].expand(ranking.scores.shape[:2])
        kept = ranking.select(counts)
        if not all(rows):
            kept |= ranking.occupied & ~torch.tensor(rows, device=kept.device)[:, None, None]
        if policy.merger.merges:
            evicted = ranking.occupied & ~kept
            view = self.index, phase, held.keys, held.values, held.positions, held.state
            self.write(policy.merger.absorb(Eviction(*view, kept, evicted), self.memory))
        asked = [b if row else count for row, b, count in zip(rows, budgets, self.counts, strict=True)]
        spare = 1 if policy.schedule.decode == "evict" else 0
        slots = held.keep(kept, spare, counts=asked if per_head is None else None)
        # What was asked for, or what an allocator gave instead: shapes tell it without a look at the device.
        most = 0 if policy.allocator.per_head else slots.shape[-1]
        self.counts = asked if most <= max(asked) else [most] * len(asked)
        if self.ranking is not None:
            self.ranking = ranking.at(slots, held.positions, held.packed)
        return kept

    def shrink_to_share(self, rows: Sequence[bool]) -> None:
        """Bring a prompt that was ranked but not yet evicted to this layer's share, in the chosen sequences."""
        assert self.ranking is not None
        budgets = self.cache.budgets.of(self.index, rows)
        over = tuple(row and count > b for row, count, b in zip(rows, self.counts, budgets, strict=True))
        if any(over):
            ranking = self.ranking.protecting(*self.policy.protected_counts(budgets))
            self.shrink_to(ranking, budgets, over, "prompt")
            self.cache.note_bytes(self.index)

    def remember(self, shown: Evidence, memory: MergeState) -> None:
        """What a merger knows of the sequences of a step from now on."""
        for name, x in memory.items():
            if name not in self.memory:
                self.memory[name] = x.new_zeros(len(self.counts), *x.shape[1:])
            self.memory[name][shown.rows] = x

    def write(self, merged: Merged | None) -> None:
        """Let what was evicted leave its trace."""
        if merged is not None:
            self.held.write(merged.slots, merged.keys, merged.values)

    def settle(self, prompt_done: bool) -> None:
        """A step is over: let the store bring what it holds into its final form, once every prompt is in."""
        if prompt_done and not self.unsettled:
            self.held.settle()
        self.cache.note_bytes(self.index)

    def limit_window(self, shown: Evidence) -> None:
        """A part of the prompt is in: hold no more queries than the steps to come look through."""
        policy, now = self.policy, shown.now
        if now.phase == "decode":
            return
        if now.prompt_done and (any(now.evicts) or policy.schedule.decode == "grow"):
            self.recent.limit(policy.queries_decoding)  # nothing of the prompt waits for its window any more
        self.recent.keep_copy()
