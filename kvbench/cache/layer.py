"""One layer of the cache: takes new tokens in, attends, and keeps what its policy keeps.

Shapes: B batch, H_q query heads, H_kv KV heads, M new tokens of a call, m of a step, C slots, D head dim.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache.attention import attend, weigh
from kvbench.cache.interface import Handed, InterfaceError, OneWay, check_heads, name_of
from kvbench.cache.joint_eviction import PendingEviction
from kvbench.cache.recent_queries import RecentQueries
from kvbench.cache.steps import Slice
from kvbench.cache.uncompiled import uncompiled
from kvbench.cache.whole import Whole
from kvbench.kernels.attention_rows import visible
from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Eviction, Merged, MergeState, OneEviction
from kvbench.policies.observation import Arithmetic, Observation, Phase
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.store import Held


class KVLayer(Handed, OneWay, CacheLayerMixin):
    """What one model layer holds. `update` hands itself to the attention function, which calls `step`."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: Whole, index: int) -> None:
        self._cache = cache
        self._index = index
        self._held: Held | None = None
        self.counts: list[int] = []  # tokens held per KV head, for each sequence
        self._recent = RecentQueries(cache.policy.queries_needed)
        self._pending: Ranking | None = None  # scores of a prompt whose share is not settled yet
        self._tokens_to_come: tuple[Observation, Slice] | None = None  # a prompt whose scores come after all layers
        self._memory: MergeState = {}
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
        pending = 0 if self._pending is None else self._pending.nbytes
        return held + pending + self._recent.nbytes + sum(x.nbytes for x in self._memory.values())

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
        return bool(self.counts) and tuple(self.counts) == self._cache.budgets.of(
            self._index, [True] * len(self.counts)
        )

    def kept_tokens(self) -> Tensor:
        """[B,H_kv] tokens held."""
        return (self.positions >= 0).sum(-1)

    # --- the interface of transformers -----------------------------------------------------------------------------
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        policy, first = self._cache.policy, self._cache.layers[0].keys
        if first is not None:
            check_heads({first.shape[1], key_states.shape[1]}, name_of(self._cache.config))
        width = self._query_heads // key_states.shape[1] if policy.per_query_head else 1
        self._held = policy.store.for_layer(self._index).open(key_states, value_states, policy.statistics, width)
        self.is_initialized = True

    @uncompiled  # transformers hands on to attention what this returns, keys and values or not
    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple["KVLayer", "KVLayer"]:
        """Keep the new keys and values at hand and hand the layer itself to the attention function."""
        if self._index == 0:
            self._cache.check_attention()
        assert self._new is None, "the attention function did not take the last call's keys"
        self._new = (key_states, value_states)
        return self, self

    def get_seq_length(self) -> int:
        return self._cache.seen_before

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def reset(self) -> None:
        self.__init__(self._cache, self._index)  # type: ignore[misc]

    def reopen(self) -> None:
        """Another prompt comes, to be looked at as the first one was."""
        self._recent.reopen(self._cache.policy.queries_needed)

    def check_model(self, module: nn.Module) -> None:
        """ValueError if the attention of another kind of model reads this cache; the first layer asks for all."""
        if self._index == 0:
            self._cache.check_model(module.config)

    # --- one call of the model -------------------------------------------------------------------------------------
    def forward(self, queries: Tensor, mask: Tensor | None, how: Arithmetic) -> Tensor:
        """Take the pending keys and values in, attend, evict as scheduled: [B,H_q,M,D] -> [B,H_q,M,D].

        mask [B,M] bool marks the real tokens of this call, None if all are.
        """
        if self._new is None:
            raise InterfaceError(
                f"the model reads the keys and values of layer {self._index} in another layer too, while kvbench "
                "evicts from each layer what that layer reads"
            )
        keys, values = self._new
        self._new = None
        if self._cache.policy.granularity == "query_head":
            group = queries.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        if self._held is None:
            self._query_heads = queries.shape[1]
            self.counts = [0] * keys.shape[0]
            self.lazy_initialization(keys, values)
        slices = self._cache.slices(self._index, queries, mask)
        if len(slices) == 1 and slices[0].columns == slice(0, queries.shape[2]):
            out = self._step(queries, keys, values, slices[0], how)
        else:
            out = values.new_zeros(*queries.shape[:3], values.shape[-1])
            for part in slices:
                here = part.columns
                out[:, :, here] += self._step(queries[:, :, here], keys[:, :, here], values[:, :, here], part, how)
        self._cache.layer_done(self._index)
        return out

    def _step(self, queries: Tensor, keys: Tensor, values: Tensor, now: Slice, how: Arithmetic) -> Tensor:
        held = self._held
        assert held is not None
        fresh = not any(self.counts)
        held.append(keys, values, now.positions, absent=not now.aligned)
        self.counts = [held_so_far + new for held_so_far, new in zip(self.counts, now.counts, strict=True)]
        self._cache.note_bytes(self._index)
        if held.watching:
            held.observe(self._observation(queries, now, how, None), self._cache.prompts)
        if self._may_wait(now):
            return self._attend_and_wait(queries, now, how)
        shown = self._shown(queries, now, how)
        if self._cache.policy.schedule.order == "attend_then_evict":
            out = self._attend(queries, now, how, shown, fresh)
            self._evict(now, shown)
            self._settle(now)
            return out
        self._evict(now, shown)
        out = attend(queries, now, held, how, fresh=False)
        self._settle(now)
        # A query of this step that no survivor is visible to sees itself; padding and other steps' queries stay 0.
        blind = ~visible(now.positions, held.positions, how.sliding_window).any(-1)  # [B,H_kv,m]
        blind &= (now.positions >= 0)[:, None]
        group = queries.shape[1] // values.shape[1]
        own = values.repeat_interleave(group, dim=1)
        return torch.where(blind.repeat_interleave(group, dim=1)[..., None], own, out)

    def _shown(self, queries: Tensor, now: Slice, how: Arithmetic) -> Observation | None:
        """What the policy is shown of a step, its observation window included; None where nothing is scored."""
        if self._cache.policy.scorer is None or (now.phase == "decode" and not any(now.evicts)):
            return None
        recent = self._recent.add(queries, now.positions, aligned=now.aligned)
        return self._observation(queries, now, how, recent)

    def _may_wait(self, now: Slice) -> bool:
        """Whether this step's eviction can be left to the end of the call: one decoded token in every sequence."""
        decoded = now.phase == "decode" and now.aligned
        return decoded and self._held is not None and self._held.side_by_side and self._cache.gives_up_together

    def _attend_and_wait(self, queries: Tensor, now: Slice, how: Arithmetic) -> Tensor:
        """Attention of a decoded token; its eviction waits for the end of the call, where all layers' come together."""
        assert self._cache.policy.scorer is not None
        recent = self._recent.add(queries, now.positions, aligned=True)
        observe = partial(self._observation, queries, now, how, recent)
        shown = observe() if self._cache.policy.scorer.reads_newest_row else None
        out = self._attend(queries, now, how, shown, fresh=False)
        self._cache.deferred_evictions.append(lambda: self._evict(now, shown or observe()))
        return out

    def _attend(self, queries: Tensor, now: Slice, how: Arithmetic, shown: Observation | None, fresh: bool) -> Tensor:
        """Attention of the step before its eviction; rows that the policy reads too are computed once."""
        held, scorer = self._held, self._cache.policy.scorer
        assert held is not None
        if shown is not None and scorer is not None and (fresh or not held.attends):
            if scorer.reads_newest_row and not held.attends:
                out = shown.attend_newest()
                if out is not None:
                    return out
            if shown.sees_all and now.aligned:
                if scorer.reads_newest_row and not held.attends:
                    return weigh(shown.window_attention(1), held.values)
            elif scorer.sums_up is not None:
                out = shown.attend_and_sum(scorer.sums_up)
                if out is not None:
                    return out
        return attend(queries, now, held, how, fresh)

    def _settle(self, now: Slice) -> None:
        """Let the store bring what it holds into its final form, once every prompt of the batch is in."""
        assert self._held is not None
        if now.prompt_done and self._pending is None and self._tokens_to_come is None:
            self._held.settle()
        self._cache.note_bytes(self._index)

    def allocated(self, prompt_done: bool) -> None:
        """The shares of all layers are settled: forget the scores kept for them."""
        assert self._held is not None
        self._pending = None
        if prompt_done:
            self._held.settle()
        self._cache.note_bytes(self._index)

    def _evict(self, now: Slice, observation: Observation | None) -> None:
        """Let the policy observe what it is shown and, where that is due, bring the layer back to its budget."""
        if observation is None:
            return
        policy, held = self._cache.policy, self._held
        assert held is not None
        assert policy.scorer is not None
        state = held.state
        policy.scorer.observe(observation, state)
        held.remember(state)
        if policy.scorer.needs_surprisal and now.phase != "decode":
            self._tokens_to_come = replace(observation, queries=observation.queries[:, :, :0].clone()), now
        elif any(now.evicts):
            self._shrink(observation, now)
        if now.prompt_done and (any(now.evicts) or policy.schedule.decode == "grow"):
            self._recent.limit(policy.queries_decoding)  # nothing of the prompt waits for its window any more
        if now.phase != "decode":
            self._recent.keep_copy()

    def surprised(self) -> None:
        """The surprisal of the prompt that was just taken in is known: score it, and evict where that is due."""
        policy, held = self._cache.policy, self._held
        assert held is not None
        assert policy.scorer is not None
        assert self._tokens_to_come is not None
        (observation, now), self._tokens_to_come = self._tokens_to_come, None
        state = held.state
        policy.scorer.observe(observation, state)
        held.remember(state)
        if any(now.evicts):
            self._shrink(observation, now)
        self._settle(now)

    def _observation(
        self, queries: Tensor, now: Slice, how: Arithmetic, recent: tuple[Tensor, Tensor] | None
    ) -> Observation:
        held, policy = self._held, self._cache.policy
        assert held is not None
        budgets = self._cache.budgets.of(self._index, now.evicts) if policy.evicts else ()
        return Observation(
            layer=self._index,
            queries=queries,
            query_positions=now.positions,
            keys=held.keys,
            values=held.values,
            positions=held.positions,
            seen=now.seen,
            scaling=how.scaling,
            phase=now.phase,
            recent_queries=recent and recent[0],
            recent_positions=recent and recent[1],
            sighted=recent is not None and self._recent.real and policy.keeps_window(budgets),
            softcap=how.softcap,
            sliding_window=how.sliding_window,
            sinks=how.sinks,
            ascending=held.ascending,
            packed=held.packed,
            aligned=now.aligned,
            last=now.newest,
            opens=now.opens,
            whole=self.counts == list(now.ends),
            budgets=budgets,
            shared=self._cache.shared,
        )

    def _shrink(self, observation: Observation, now: Slice) -> None:
        """Evict down to the budget in every sequence whose turn it is, or leave that to the allocation over layers."""
        policy, held = self._cache.policy, self._held
        assert held is not None
        budgets = observation.budgets
        excess = [count - b if due else 0 for due, count, b in zip(now.evicts, self.counts, budgets, strict=True)]
        if isinstance(policy.allocator, StatisticAllocator) and now.phase != "decode":
            if any(now.evicts):
                self._pending = policy.rank(observation, held.state)
                over_mean = self._cache.budgets.exceeded(now.evicts)
                statistic = policy.allocator.measure(observation, held.state)
                self._cache.allocate(self._index, over_mean, statistic, now.prompt_done)
            return
        if max(excess) <= 0:
            return
        over = tuple(n > 0 for n in excess)
        one = now.phase == "decode" and max(excess) == 1
        self.counts = [b if o else count for o, b, count in zip(over, budgets, self.counts, strict=True)]
        if one and all(over) and self._may_wait(now):
            self._cache.joint_evictions.append(PendingEviction(held, self._memory, observation))
            return
        ranking = policy.rank(observation, held.state)
        if one:
            victims = self._give_up_one(ranking, over, now.phase)
            if policy.scorer is not None and policy.scorer.looks_back:
                going = on_device(over, victims.device)[:, None, None].expand_as(victims)
                policy.scorer.selected(observation, observation.occupied.scatter(-1, victims, ~going))
        else:
            kept = self._shrink_to(ranking, budgets, over, now.phase)
            if policy.scorer is not None and now.phase != "decode":
                policy.scorer.selected(observation, kept)

    def _give_up_one(self, ranking: Ranking, rows: Sequence[bool], phase: Phase) -> Tensor:
        """Evict one token per KV head of the chosen sequences, in place, and return the slots [B,H_kv,1] of all."""
        held = self._held
        assert held is not None
        victims = ranking.victim()
        if self._cache.policy.merger.merges:
            going = None if all(rows) else on_device(tuple(rows), victims.device)[:, None, None]
            view = self._index, phase, held.keys, held.values, held.positions, held.state
            one = OneEviction(*view, victims, going, ranking.packed)
            self._write(self._cache.policy.merger.absorb_one(one, self._memory))
        held.release(victims, None if all(rows) else rows)
        return victims

    def _shrink_to(self, ranking: Ranking, budgets: Sequence[int], rows: Sequence[bool], phase: Phase) -> Tensor:
        """Evict to the budgets in the chosen sequences and return the slots that stayed, bool [B,H_kv,T]."""
        policy, held = self._cache.policy, self._held
        assert held is not None
        per_head = policy.allocator.heads(self._index, ranking, budgets)
        counts: Tensor | int | None = per_head
        if counts is None:
            same = len(set(budgets)) == 1
            counts = budgets[0] if same else ranking.seen.new_tensor(budgets)[:, None].expand(ranking.scores.shape[:2])
        kept = ranking.select(counts)
        if not all(rows):
            kept |= ranking.occupied & ~torch.tensor(rows, device=kept.device)[:, None, None]
        if policy.merger.merges:
            evicted = ranking.occupied & ~kept
            eviction = Eviction(self._index, phase, held.keys, held.values, held.positions, held.state, kept, evicted)
            self._write(policy.merger.absorb(eviction, self._memory))
        asked = [b if row else count for row, b, count in zip(rows, budgets, self.counts, strict=True)]
        spare = 1 if policy.schedule.decode == "evict" else 0
        slots = held.keep(kept, spare, counts=asked if per_head is None else None)
        # What was asked for, or what an allocator gave instead: shapes tell it without a look at the device.
        most = 0 if policy.allocator.per_head else slots.shape[-1]
        self.counts = asked if most <= max(asked) else [most] * len(asked)
        if self._pending is not None:
            self._pending = ranking.at(slots, held.positions)
        return kept

    def shrink_pending(self, rows: Sequence[bool]) -> None:
        """Bring a prompt that was ranked but not yet evicted to this layer's share, in the chosen sequences."""
        ranking, policy = self._pending, self._cache.policy
        assert ranking is not None
        budgets = self._cache.budgets.of(self._index, rows)
        over = tuple(row and count > b for row, count, b in zip(rows, self.counts, budgets, strict=True))
        if any(over):
            ranking = ranking.protecting(*policy.protected_counts(budgets))
            self._shrink_to(ranking, budgets, over, "prompt")
            self._cache.note_bytes(self._index)

    def _write(self, merged: Merged | None) -> None:
        assert self._held is not None
        if merged is not None:
            self._held.write(merged.slots, merged.keys, merged.values)
