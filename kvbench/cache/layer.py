"""One layer of the cache, as the model meets it: it takes new tokens in, attends, and hands over to the eviction.

Shapes: B batch, H_q query heads, H_kv KV heads, M new tokens of a call, m of a step, C slots, D head dim.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache.attention import attend
from kvbench.cache.eviction import EvictingLayer
from kvbench.cache.evidence import ALL, Evidence
from kvbench.cache.interface import Handed, InterfaceError, OneWay, check_heads, name_of
from kvbench.cache.recent_queries import RecentQueries
from kvbench.cache.steps import Slice
from kvbench.cache.uncompiled import uncompiled
from kvbench.cache.whole import Whole
from kvbench.kernels.attention_rows import visible
from kvbench.policies.mergers.merger import MergeState
from kvbench.policies.observation import Arithmetic, Known, Observation
from kvbench.policies.stores.store import Held


class KVLayer(EvictingLayer, Handed, OneWay, CacheLayerMixin):
    """What one model layer holds. `update` hands itself to the attention function, which calls `forward`."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: Whole, index: int) -> None:
        EvictingLayer.__init__(self, cache, index)
        self._new: tuple[Tensor, Tensor] | None = None
        self._query_heads = 0
        self.is_initialized = False

    # --- what attention sees ---------------------------------------------------------------------------------------
    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """[B,H_kv,C,D], None before the first token."""
        return None if self._held is None else self._held.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """[B,H_kv,C,D], None before the first token."""
        return None if self._held is None else self._held.values

    @property
    def positions(self) -> Tensor:
        """LongTensor [B,H_kv,C]: original position of each slot, -1 = empty."""
        if self._held is None:
            return torch.empty(0, 0, 0, dtype=torch.long)
        return self._held.positions.long()

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held: keys, values, positions, running statistics, query buffer."""
        held = 0 if self._held is None else self._held.nbytes
        ranking = 0 if self.ranking is None else self.ranking.nbytes
        memory = sum(x.nbytes for x in self.memory.values()) if self.memory else 0
        return held + ranking + memory + self.recent.nbytes

    @property
    def spare_nbytes(self) -> int:
        """Those of them in which no token lies: room for tokens to come, and slots of evicted ones."""
        return 0 if self._held is None else self._held.spare_nbytes

    def expect(self, tokens: int) -> None:
        """No more than so many tokens will follow the prompt: no more room is made."""
        if self._held is not None:
            self._held.expect(tokens)

    @property
    def at_budget(self) -> bool:
        """Whether every sequence holds exactly its budget here."""
        return bool(self.counts) and tuple(self.counts) == self.cache.budgets.of(self.index, [True] * len(self.counts))

    def kept_tokens(self) -> Tensor:
        """[B,H_kv] tokens held."""
        return (self.positions >= 0).sum(-1)

    # --- the interface of transformers -----------------------------------------------------------------------------
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        policy, first = self.policy, self.cache.layers[0].keys
        if first is not None:
            check_heads({first.shape[1], key_states.shape[1]}, name_of(self.cache.config))
        width = self._query_heads // key_states.shape[1] if policy.per_query_head else 1
        self._held = policy.store.for_layer(self.index).open(key_states, value_states, policy.statistics, width)
        self.is_initialized = True

    @uncompiled  # transformers hands on to attention what this returns, keys and values or not
    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple["KVLayer", "KVLayer"]:
        """Keep the new keys and values at hand and hand the layer itself to the attention function."""
        if self.index == 0:
            self.cache.check_attention()
        self.hand(key_states, value_states)
        return self, self

    def hand(self, keys: Tensor, values: Tensor) -> None:
        """The keys and values [B,H_kv,M,D] that the next `forward` or `begin` takes in."""
        assert self._new is None, "the attention function did not take the last call's keys"
        self._new = (keys, values)

    def get_seq_length(self) -> int:
        return self.cache.seen_before

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def like(
        self, cache: Whole, index: int, held: Held, recent: RecentQueries, memory: MergeState, counts: list[int]
    ) -> "KVLayer":
        """The same layer of another cache, with other sequences."""
        found = type(self)(cache, index)
        found._held, found.recent, found.memory, found.counts = held, recent, memory, counts
        found._query_heads, found.is_initialized = self._query_heads, True
        return found

    def let_go(self) -> None:
        """What it held is held elsewhere from now on."""
        self._held = None

    def reset(self) -> None:
        self.__init__(self.cache, self.index)  # type: ignore[misc]

    def reopen(self) -> None:
        """Another prompt comes, to be looked at as the first one was."""
        self.recent.reopen(self.policy.queries_needed)

    def check_model(self, module: nn.Module) -> None:
        """ValueError if the attention of another kind of model reads this cache; the first layer asks for all."""
        if self.index == 0:
            self.cache.check_model(module)

    # --- one call of the model -------------------------------------------------------------------------------------
    def forward(self, queries: Tensor, mask: Tensor | None, how: Arithmetic) -> Tensor:
        """Take the pending keys and values in, attend, evict as scheduled: [B,H_q,M,D] -> [B,H_q,M,D].

        mask [B,M] bool marks the real tokens of this call, None if all are.
        """
        keys, values = self._arrived(queries)
        cache = self.cache
        steps = cache.slices(self.index, queries, mask)
        if len(steps) == 1 and steps[0].positions.shape[1] == queries.shape[2]:
            out = self._step(queries, keys, values, steps[0], how, alone=True)
        else:
            out = values.new_zeros(*queries.shape[:3], values.shape[-1])
            for now in steps:
                q, k, v = (x[:, :, now.columns] for x in (queries, keys, values))
                out[:, :, now.columns] += self._step(q, k, v, now, how, alone=len(steps) == 1)
        cache.layer_done(self.index)
        return out

    def _arrived(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that came with this call, once for each head that keeps tokens of its own."""
        if self._new is None:
            raise InterfaceError(
                f"the model reads the keys and values of layer {self.index} in another layer too, while kvbench "
                "evicts from each layer what that layer reads"
            )
        (keys, values), self._new = self._new, None
        if self.policy.granularity == "query_head":
            group = queries.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        if self._held is None:
            self._query_heads = queries.shape[1]
            self.counts = [0] * keys.shape[0]
            self.lazy_initialization(keys, values)
        return keys, values

    def _step(self, queries: Tensor, keys: Tensor, values: Tensor, now: Slice, how: Arithmetic, alone: bool) -> Tensor:
        """One step of the schedule."""
        shown = self.take_in(queries, keys, values, now, how, alone)
        if self.policy.schedule.order == "attend_then_evict":
            out = attend(shown, self.policy.scorer)
            self.cache.evict(self.index, shown)
            return out
        self.cache.evict(self.index, shown)
        return self._attend_to_survivors(shown, values)

    def begin(self, queries: Tensor, how: Arithmetic, known: Known) -> Evidence:
        """Take in a prompt whose attention another cache's layer computes; `finish` follows. known: see `take_in`."""
        keys, values = self._arrived(queries)
        (now,) = self.cache.slices(self.index, queries, None)
        return self.take_in(queries, keys, values, now, how, alone=True, known=known)

    def finish(self, shown: Evidence) -> None:
        """The attention of what was begun is computed: evict."""
        self.cache.evict(self.index, shown)
        self.cache.layer_done(self.index)

    def take_in(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        now: Slice,
        how: Arithmetic,
        alone: bool,
        known: Known | None = None,
    ) -> Evidence:
        """Append a step's keys and values [B,H_kv,m,D]; what its queries [B,H_q,m,D] then show.

        known: what others computed of the very same step, to be read and added to.
        """
        policy, held = self.policy, self.held
        fresh = not any(self.counts)
        held.append(keys, values, now.places, absent=not now.aligned)
        self.counts = [held_so_far + new for held_so_far, new in zip(self.counts, now.counts, strict=True)]
        self.cache.note_bytes(self.index)
        if held.watching:
            shown = Evidence(queries, now, how, held, fresh, alone=alone)
            held.observe(self._look(known, None, shown), self.cache.prompts)
        look = None
        if policy.scorer is not None and (now.phase != "decode" or any(now.evicts)):
            recent = self.recent.add(queries, now.positions, now.aligned)
            look = partial(self._look, known, recent)
        shown = Evidence(queries, now, how, held, fresh, look, alone)
        if held.by_length:
            shown.parts = tuple(shown.of(rows, part) for rows, part in held.by_length)
        return shown

    def _attend_to_survivors(self, shown: Evidence, values: Tensor) -> Tensor:
        """Attention of a step whose eviction came first (CAOTE, eq. 5-7); a query that no survivor is visible to sees
        itself, padding and other steps' queries stay 0. values [B,H_kv,m,D] are the step's own.
        """
        now, how = shown.now, shown.how
        out = attend(replace(shown, fresh=False, look=None, parts=()), None)
        blind = ~visible(now.positions, self.held.positions, how.sliding_window).any(-1)  # [B,H_kv,m]
        blind &= (now.positions >= 0)[:, None]
        group = out.shape[1] // values.shape[1]
        own = values.repeat_interleave(group, dim=1)
        return torch.where(blind.repeat_interleave(group, dim=1)[..., None], own, out)

    def _look(self, known: Known | None, recent: tuple[Tensor, Tensor] | None, shown: Evidence) -> Observation:
        now, how, held, rows, policy = shown.now, shown.how, shown.held, shown.rows, self.policy
        budgets = self.cache.budgets.of(self.index, now.evicts, rows.start or 0) if policy.evicts else ()
        if recent is not None and rows is not ALL:
            recent = recent[0][rows], recent[1][rows]
        seen = Observation(
            layer=self.index,
            queries=shown.queries,
            query_positions=now.positions,
            keys=held.keys,
            values=held.values,
            positions=held.positions,
            seen=now.seen,
            scaling=how.scaling,
            phase=now.phase,
            recent_queries=recent and recent[0],
            recent_positions=recent and recent[1],
            sighted=recent is not None and self.recent.real and policy.keeps_window(budgets),
            softcap=how.softcap,
            sliding_window=how.sliding_window,
            sinks=how.sinks,
            ascending=held.ascending,
            packed=held.packed,
            aligned=now.aligned,
            last=now.newest,
            opens=now.opens,
            whole=self.counts[rows] == list(now.ends),
            budgets=budgets,
            shared=self.cache.shared,
        )
        return seen if known is None else seen.knowing(known)
