"""What one layer holds for the sequences under one policy, and how a step's tokens enter it.

Shapes: B batch, H_q query heads, H_kv KV heads, m tokens of a step, C slots, D head dim.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.cache.attention import ALL, QKV, LayerStep
from kvbench.cache.budgets import Budgets
from kvbench.cache.reading import PageReads
from kvbench.cache.steps import BatchStep
from kvbench.policies.latents import LatentObservation
from kvbench.policies.layer_budgets import read_plan
from kvbench.policies.observation import MOVED, AttentionParams, Memory, Observation, StepCache
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.store import LayerStore
from kvbench.policies.stores.store_list import StoreList


class Context(NamedTuple):
    """What a layer knows of its sequences: budgets, prompts' lengths, where questions begin, what scorers share.

    known: what was computed of the very same step for another policy, to be read and added to.
    """

    budgets: Budgets
    prompts: list[int]
    questions: list[int]
    shared: dict[str, Tensor]
    known: StepCache | None = None


class RecentQueries:
    """Up to `window` newest rotated queries [B,H_q,w,D] and their positions [B,w] (-1 = none), oldest first."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._queries: Tensor | None = None
        self._positions: Tensor | None = None
        self.real = True  # none of them is padding

    @property
    def nbytes(self) -> int:
        if self._queries is None or self._positions is None:
            return 0
        return self._queries.nbytes + self._positions.nbytes

    def add(self, queries: Tensor, positions: Tensor, aligned: bool) -> tuple[Tensor, Tensor] | None:
        """Take in queries [B,H_q,m,D] at positions [B,m] and return the newest; None where no window is needed.

        aligned: all sequences add the same positions and none is padding.
        """
        window, new = self._window, queries.shape[2]
        if window == 0:
            return None
        self.real = aligned and (self.real or new >= window)
        if self._queries is not None and self._positions is not None and not (aligned and new >= window):
            first = max(0, self._queries.shape[2] + new - window) if aligned else 0  # older ones make room
            queries = torch.cat([self._queries[:, :, first:], queries], dim=2)
            positions = torch.cat([self._positions[:, first:], positions], dim=1)
        if not aligned:
            order = positions.argsort(dim=-1, stable=True)[:, -window:]
            queries = queries.gather(2, order[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3]))
            positions = positions.gather(1, order)
        self._queries, self._positions = queries[:, :, -window:], positions[:, -window:]
        return self._queries, self._positions

    def keep_copy(self) -> None:
        """Own them: views keep a whole prompt's queries alive, and the positions of a step are all layers'."""
        if self._queries is not None and self._positions is not None:
            own = (x.clone(memory_format=torch.contiguous_format) for x in (self._queries, self._positions))
            self._queries, self._positions = own

    @property
    def held(self) -> tuple[Tensor, Tensor] | None:
        """Queries and positions, if there are any."""
        return None if self._queries is None or self._positions is None else (self._queries, self._positions)

    @property
    def full(self) -> bool:
        """Whether a new query takes the place of an old one: as many are held as ever will be."""
        return self._window == (0 if self._queries is None else self._queries.shape[2])

    def hold(self, queries: Tensor, positions: Tensor) -> None:
        """Hold these instead."""
        self._queries, self._positions = queries, positions

    @property
    def shape(self) -> Hashable:
        """What buffers have in common whose sequences may stand in one batch."""
        return self._window, self.real, None if self._queries is None else self._queries.shape[2]

    @staticmethod
    def of_rows(rows: Sequence[tuple["RecentQueries", int]]) -> "RecentQueries":
        """Sequences out of buffers of one shape, in memory of their own."""
        first = rows[0][0]
        found = RecentQueries(first._window)
        found.real = first.real
        if first._queries is not None:
            found._queries = torch.stack([part._queries[row] for part, row in rows if part._queries is not None])
            found._positions = torch.stack([part._positions[row] for part, row in rows if part._positions is not None])
        return found

    def reopen(self, window: int) -> None:
        """From now on the newest `window` queries are needed again: those still held and those to come."""
        self._window = window

    def limit(self, window: int) -> None:
        """From now on only the newest `window` queries are needed, and no more are held."""
        if window == 0:
            self._queries = self._positions = None
        elif self._queries is not None and self._positions is not None:
            self._queries, self._positions = self._queries[:, :, -window:], self._positions[:, -window:]
        self._window = window


class LayerState:
    """What one layer holds for the sequences under one policy: tokens, statistics, an observation window.

    counts: tokens held per KV head, for each sequence. memory: what scorer and merger remember of each sequence.
    ranking: the scores of a prompt whose budget is not known yet. unsettled: a prompt is in, and its eviction is still
    to come. pages: of its reader.
    """

    def __init__(self, policy: Policy, index: int) -> None:
        self.policy = policy
        self.index = index
        self.counts: list[int] = []
        self.memory: Memory = {}
        self.ranking: Ranking | None = None
        self.unsettled = False
        self.recent = RecentQueries(policy.needs.window)
        self.pages = None if policy.reader is None else PageReads()
        self.query_heads = 0
        self._store: LayerStore | None = None

    @property
    def opened(self) -> bool:
        """Whether it holds anything yet."""
        return self._store is not None

    @property
    def store(self) -> LayerStore:
        """The store, once the first token came."""
        assert self._store is not None, "the layer holds nothing yet"
        return self._store

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held: keys, values, positions, running statistics, observation window."""
        held = 0 if self._store is None else self._store.nbytes
        ranking = 0 if self.ranking is None else self.ranking.nbytes
        memory = sum(x.nbytes for x in self.memory.values()) if self.memory else 0
        pages = 0 if self.pages is None else self.pages.nbytes
        return held + ranking + memory + pages + self.recent.nbytes

    @property
    def spare_nbytes(self) -> int:
        """Bytes reserved but unused: capacity for new tokens, and the slots of evicted ones."""
        return 0 if self._store is None else self._store.spare_nbytes

    @property
    def positions(self) -> Tensor:
        """LongTensor [B,H_kv,C]: original position of each slot, -1 = empty."""
        return torch.empty(0, 0, 0, dtype=torch.long) if self._store is None else self._store.positions.long()

    def like(self, held: LayerStore, recent: RecentQueries, memory: Memory, counts: list[int]) -> "LayerState":
        """The same layer with other sequences."""
        found = LayerState(self.policy, self.index)
        found._store, found.recent, found.memory, found.counts = held, recent, memory, counts
        found.query_heads = self.query_heads
        return found

    def hold(self, store: LayerStore) -> None:
        """What it holds lies in another store from now on."""
        self._store = store

    def give_away(self) -> LayerStore:
        """The store, which somebody else holds from now on."""
        held, self._store = self.store, None
        return held

    def expect(self, tokens: int) -> None:
        """At most so many tokens follow: no more capacity is reserved."""
        if self._store is not None:
            self._store.expect(tokens)

    # --- a step ----------------------------------------------------------------------------------------------------
    def prepare(self, new: QKV) -> QKV:
        """The new tokens as this policy stores them: once per query head where each keeps its own set."""
        if self.policy.granularity == "query_head":
            group = new.queries.shape[1] // new.keys.shape[1]
            keys, values = (x.repeat_interleave(group, dim=1) for x in (new.keys, new.values))
            new = QKV(new.queries, keys, values)
        if self._store is None:
            self.query_heads = new.queries.shape[1]
            self.counts = [0] * new.keys.shape[0]
            group = self.query_heads // new.keys.shape[1]
            width = group if self.policy.needs.query_heads else 1
            store = self.policy.store.for_layer(self.index)
            self._store = store.open(new.keys, new.values, self.policy.needs.statistics, width)
        return new

    def append(self, new: QKV, now: BatchStep, params: AttentionParams, alone: bool, context: Context) -> LayerStep:
        """Append a step's keys and values [B,H_kv,m,D]."""
        policy, held = self.policy, self.store
        seen = policy.scorer is not None and (now.phase != "decode" or any(now.evicts))
        fresh = not any(self.counts)
        held.append(new.keys, new.values, now.places, absent=not now.aligned)
        before, self.counts = self.counts, [n + more for n, more in zip(self.counts, now.counts, strict=True)]
        if self.pages is not None:
            self._summarise(self.pages, held, now, before, context.prompts)
        if held.watching:
            step = LayerStep(new.queries, now, params, held, fresh, alone=alone)
            held.observe(self._observe(context, None, step), context.prompts)
        read = None
        if self.pages is not None and now.phase == "decode":
            read = partial(self.pages.attend, policy, self.index, context.prompts)
        step = LayerStep(new.queries, now, params, held, fresh, None, alone, read, known=context.known)
        if seen:
            self._show(step, context)
        if isinstance(held, StoreList) and held.shape is not None:
            step.parts = tuple(step.of(rows, part) for rows, part in held.by_length)
        return step

    def _summarise(
        self, pages: PageReads, held: LayerStore, now: BatchStep, before: Sequence[int], prompts: Sequence[int]
    ) -> None:
        """Summarise the pages of a step's tokens; of a prompt that is evicted, once the first token is decoded."""
        reader = self.policy.reader
        assert reader is not None
        if reader.evicts and now.phase != "decode":
            pages.clear()
        elif not reader.reads_all(self.index):
            sizes = [read_plan(self.policy, length).page for length in prompts]
            pages.append(reader, held, before, self.counts, sizes)

    def _show(self, step: LayerStep, context: Context) -> None:
        """Let the policy see a step, whose queries enter the window."""
        policy, now = self.policy, step.now
        if policy.needs.question and now.phase != "decode":
            longest = max(end - begin for begin, end in zip(context.questions, context.prompts, strict=True))
            self.recent.reopen(max(longest, policy.needs.window))
        recent = self.recent.add(step.queries, now.positions, now.aligned)
        step.observe = partial(self._observe, context, recent)

    def _observe(self, context: Context, recent: tuple[Tensor, Tensor] | None, step: LayerStep) -> Observation:
        now, params, held, rows, policy = step.now, step.params, step.store, step.rows, self.policy
        kind = Observation if params.latents is None else LatentObservation
        budgets = context.budgets.of(self.index, now.evicts, rows.start or 0, now.ends) if policy.evicts else ()
        if recent is not None and rows is not ALL:
            recent = recent[0][rows], recent[1][rows]
        seen = kind(
            layer=self.index,
            queries=step.queries,
            query_positions=now.positions,
            keys=step.attended.keys,
            values=step.attended.values,
            positions=held.positions,
            seen=now.seen,
            scaling=params.scaling,
            phase=now.phase,
            recent_queries=recent and recent[0],
            recent_positions=recent and recent[1],
            sighted=recent is not None and self.recent.real and keeps_window(policy, budgets),
            softcap=params.softcap,
            sliding_window=params.sliding_window,
            sinks=params.sinks,
            model=params.model,
            memory={name: x[rows] for name, x in self.memory.items()} if policy.needs.memory else {},
            bias=held.bias,
            moved=held.state[MOVED][..., 0] if policy.schedule.rerotate else None,
            ascending=held.ascending,
            packed=held.packed,
            aligned=now.aligned,
            last=now.newest,
            opens=now.opens,
            whole=self.counts[rows] == list(now.ends),
            budgets=budgets,
            prompts=tuple(context.prompts[rows]),
            questions=tuple(context.questions[rows]),
            shared=context.shared,
        )
        return seen if context.known is None else seen.knowing(context.known)

    def limit_window(self, now: BatchStep) -> None:
        """A part of the prompt is in: hold no more queries than later steps look through."""
        if now.phase == "decode":
            return
        if now.prompt_done and (any(now.evicts) or self.policy.schedule.decode == "grow"):
            self.recent.limit(self.policy.needs.queries_decoding)  # nothing of the prompt waits for its window any more
        self.recent.keep_copy()

    def reopen(self) -> None:
        """Another prompt comes, to be looked at as the first one was."""
        self.recent.reopen(self.policy.needs.window)


def keeps_window(policy: Policy, budgets: Sequence[int]) -> bool:
    """Whether the tokens of the queries that are looked through always stay, so that each query sees one."""
    assert policy.scorer is not None
    return not policy.needs.question and all(
        policy.scorer.protects(budget).newest >= policy.needs.window for budget in budgets
    )
