"""The cache: one layer object per model layer, each holding what its policy keeps, and an audit of all of them.

Shapes: B batch, L layers, H_q query heads, H_kv KV heads, M new tokens, C slots, D head dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from kvbench.attend import Arithmetic, attend
from kvbench.kernels.attention_rows import visible
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.stores.store import Held
from kvbench.progress import Progress, Slice
from kvbench.recent import RecentQueries


class BudgetError(RuntimeError):
    """The cache held more than its policy promised, or held it wrongly: the run would not measure what it claims."""


class KVLayer(CacheLayerMixin):
    """What one model layer holds. `update` hands itself to the attention function, which calls `step`."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: "KVCache", index: int) -> None:
        self._cache = cache
        self._index = index
        self._held: Held | None = None
        self._counts: list[int] = []  # tokens held per KV head, for each sequence
        self._recent = RecentQueries(cache.policy.queries_needed)
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
        return held + self._recent.nbytes

    def kept_tokens(self) -> Tensor:
        """[B,H_kv] tokens held."""
        return (self.positions >= 0).sum(-1)

    # --- the interface of transformers -----------------------------------------------------------------------------
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        policy = self._cache.policy
        width = self._query_heads // key_states.shape[1] if policy.per_query_head else 1
        self._held = policy.store.open(key_states, value_states, policy.statistics, width)
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple["KVLayer", "KVLayer"]:
        """Keep the new keys and values at hand and hand the layer itself to the attention function."""
        self._cache.check_attention()
        assert self._new is None, "the attention function did not take the last call's keys"
        self._new = (key_states, value_states)
        return self, self

    def get_seq_length(self) -> int:
        return self._cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.__init__(self._cache, self._index)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ValueError("kvbench caches do not follow beam search; generate with num_beams=1")

    def crop(self, *args: object, **kwargs: object) -> None:
        raise ValueError("kvbench caches cannot be cropped: evicted tokens do not come back")

    batch_repeat_interleave = batch_select_indices = crop

    # --- one call of the model -------------------------------------------------------------------------------------
    def forward(self, queries: Tensor, mask: Tensor | None, how: Arithmetic) -> Tensor:
        """Take the pending keys and values in, attend, evict as scheduled: [B,H_q,M,D] -> [B,H_q,M,D].

        mask [B,M] bool marks the real tokens of this call, None if all are.
        """
        assert self._new is not None, "attention was called before the cache was updated"
        keys, values = self._new
        self._new = None
        if self._cache.policy.granularity == "query_head":
            group = queries.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        if self._held is None:
            self._query_heads = queries.shape[1]
            self._counts = [0] * keys.shape[0]
            self.lazy_initialization(keys, values)
        slices = self._cache.slices(self._index, queries, mask)
        if len(slices) == 1 and slices[0].columns == slice(0, queries.shape[2]):
            return self._step(queries, keys, values, slices[0], how)
        out = values.new_zeros(*queries.shape[:3], values.shape[-1])
        for part in slices:
            here = part.columns
            out[:, :, here] += self._step(queries[:, :, here], keys[:, :, here], values[:, :, here], part, how)
        return out

    def _step(self, queries: Tensor, keys: Tensor, values: Tensor, now: Slice, how: Arithmetic) -> Tensor:
        held = self._held
        assert held is not None
        fresh = not any(self._counts)
        held.append(keys, values, now.positions, absent=now.newest is None)
        self._counts = [held_so_far + new for held_so_far, new in zip(self._counts, now.counts, strict=True)]
        self._cache.note_bytes(self._index)
        if self._cache.policy.schedule.order == "attend_then_evict":
            out = attend(queries, now.positions, held, how, now.newest, fresh)
            self._evict(queries, now, how)
            self._settle(now)
            return out
        self._evict(queries, now, how)
        out = attend(queries, now.positions, held, how, now.newest, fresh=False)
        self._settle(now)
        blind = ~visible(now.positions, held.positions, how.sliding_window).any(-1)  # [B,H_kv,m]
        group = queries.shape[1] // values.shape[1]
        own = values.repeat_interleave(group, dim=1)
        return torch.where(blind.repeat_interleave(group, dim=1)[..., None], own, out)

    def _settle(self, now: Slice) -> None:
        """Let the store bring what it holds into its final form, once every prompt of the batch is in."""
        assert self._held is not None
        if now.prompt_done:
            self._held.settle()
            self._cache.note_bytes(self._index)

    def _evict(self, queries: Tensor, now: Slice, how: Arithmetic) -> None:
        """Let the policy observe the step and, where that is due, bring the layer back to its budget."""
        policy, held = self._cache.policy, self._held
        assert held is not None
        if policy.scorer is None or (now.phase == "decode" and not any(now.evicts)):
            return
        recent = self._recent.add(queries, now.positions, aligned=now.newest is not None)
        observation = Observation(
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
            softcap=how.softcap,
            sliding_window=how.sliding_window,
            ascending=held.ascending,
            packed=held.packed,
        )
        state = held.state
        policy.scorer.observe(observation, state)
        if any(now.evicts):
            self._shrink(observation, state, now)
        if now.prompt_done and policy.schedule.decode == "grow":
            self._recent.forget()
        else:
            self._recent.keep_copy()
        self._cache.note_bytes(self._index)

    def _shrink(self, observation: Observation, state: State, now: Slice) -> None:
        """Evict down to the budget in every sequence whose turn it is."""
        policy, held = self._cache.policy, self._held
        assert held is not None
        budgets = [
            row[self._index] if due else 0 for row, due in zip(self._cache.budgets(now.evicts), now.evicts, strict=True)
        ]
        keep = [
            min(count, b) if due else count for count, b, due in zip(self._counts, budgets, now.evicts, strict=True)
        ]
        excess = [count - k for count, k in zip(self._counts, keep, strict=True)]
        if not any(excess):
            return
        ranking = policy.rank(observation, state, budgets)
        if now.phase == "decode" and max(excess) == 1:
            held.release(ranking.victim(), None if min(excess) == 1 else [e == 1 for e in excess])
        else:
            counts: int | Tensor = keep[0]
            if len(set(keep)) > 1:
                counts = now.seen.new_tensor(keep)[:, None].expand(-1, held.positions.shape[1])
            held.keep(ranking.select(counts), spare=1 if policy.schedule.decode == "evict" else 0)
        self._counts = keep


class KVCache(Cache):
    """A cache that holds what its policy keeps; pass it to `model.generate` or to the model itself.

    prompt_length: tokens of the prompt, one number or one per sequence; without it the first call is the whole prompt
    (schedule `prompt`), or every call of more than one token is a block (schedule `blocks`).
    Raises ValueError for a model that does not follow transformers' attention interface.
    """

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(
        self, config: PreTrainedConfig, policy: Policy, prompt_length: int | Sequence[int] | None = None
    ) -> None:
        self.config = config.get_text_config(decoder=True)
        check_interface(self.config)
        self.policy = policy
        self._progress = Progress(policy, prompt_length)
        self._slices: list[Slice] = []
        self._row_budgets: dict[int, list[int]] = {}
        super().__init__(layers=[KVLayer(self, index) for index in range(self.config.num_hidden_layers)])
        self._bytes = [0] * len(self.layers)
        self._total_bytes = 0
        self.peak_nbytes = 0

    @property
    def seen(self) -> int:
        """Tokens seen, padding columns included: where the next token of an unpadded sequence stands."""
        return self._progress.columns

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def kept_tokens(self) -> Tensor:
        """[L,B,H_kv] tokens held."""
        return torch.stack([layer.kept_tokens() for layer in self.layers])

    def check_attention(self) -> None:
        if self.config._attn_implementation != "kvbench":
            raise ValueError(
                f"the model computes attention with {self.config._attn_implementation!r}, which cannot read a KVCache: "
                'call model.set_attn_implementation("kvbench") first'
            )

    def note_bytes(self, index: int) -> None:
        """Keep the running total and its peak true after layer `index` changed what it holds."""
        now = self.layers[index].nbytes
        self._total_bytes += now - self._bytes[index]
        self._bytes[index] = now
        self.peak_nbytes = max(self.peak_nbytes, self._total_bytes)

    def slices(self, index: int, queries: Tensor, mask: Tensor | None) -> list[Slice]:
        """The steps of the current call; computed by the first layer, shared by the others."""
        if index == 0:
            self._slices = self._progress.split(queries.shape[0], queries.shape[2], mask, queries.device)
        return self._slices

    def budgets(self, rows: Sequence[bool]) -> list[list[int]]:
        """Slots per KV head of each layer, for every sequence of `rows`; fixed once a sequence first needs them."""
        for row, needed in enumerate(rows):
            if needed and row not in self._row_budgets:
                length = self._progress.prompt[row]
                self._row_budgets[row] = self.policy.layer_budgets(len(self.layers), length)
        empty = [0] * len(self.layers)
        return [self._row_budgets.get(row, empty) for row in range(len(rows))]

    def audit(self) -> None:
        """Raise BudgetError unless every layer holds at most what the policy promises, at valid positions.

        The promise: the sum of the layer budgets per KV head; beside it, where decoding grows, the decoded tokens.
        """
        if not self.policy.evicts or not self._progress.seen:
            return
        kept = self.kept_tokens().cpu()
        for row, seen in enumerate(self._progress.seen):
            prompt = self._progress.prompt[row]
            budgets = self.budgets([r == row for r in range(row + 1)])[row]
            grown = 0
            if self.policy.schedule.decode == "grow":
                grown = seen - prompt if prompt is not None else seen
            promised = sum(min(budget, seen) for budget in budgets) + grown * len(budgets)
            heads = kept[:, row].sum(0)
            if int(heads.max()) > promised:
                raise BudgetError(
                    f"sequence {row} holds {int(heads.max())} tokens over its {len(budgets)} layers in one KV head, "
                    f"{self.policy.name} promised at most {promised}"
                )
            self._audit_positions(row, seen)

    def _audit_positions(self, row: int, seen: int) -> None:
        for index, layer in enumerate(self.layers):
            positions = layer.positions[row].sort(-1).values
            twice = (positions[:, 1:] == positions[:, :-1]) & (positions[:, 1:] >= 0)
            if bool(twice.any()) or bool((positions >= seen).any()):
                raise BudgetError(f"layer {index} holds a token twice or one it never saw, in sequence {row}")


def check_interface(config: PreTrainedConfig) -> None:
    """ValueError unless the model of this config follows transformers' attention interface."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is not None and not model_class._supports_attention_backend:
        raise ValueError(
            f"{model_class.__name__} does not follow transformers' attention interface (its attention is written into "
            "the model), so kvbench cannot hold its cache; use one that does, such as Llama, Mistral, Qwen or Gemma"
        )
