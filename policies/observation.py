"""The observation of a layer that scorers receive: queries, keys and values before a possible eviction.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M new queries, T slots, D head dim.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from torch import Tensor

from kvbench.kernels.query_sums import (
    Moments,
    attention_moments,
    column_sums,
    computes_window,
    entropy,
    variance,
    window_largest,
    window_statistics,
)
from kvbench.kernels.references import attention_logits, rows_and_sight
from kvbench.policies.model_layer import ModelLayer
from kvbench.policies.step_info import (
    MOVED,
    AttentionParams,
    Memory,
    Phase,
    QueryWindow,
    SequenceInfo,
    SlotInfo,
    State,
    StepCache,
    known_weights,
)

__all__ = [
    "MOVED",
    "AttentionParams",
    "Memory",
    "Observation",
    "Phase",
    "QueryWindow",
    "SequenceInfo",
    "SlotInfo",
    "State",
    "StepCache",
    "known_weights",
]

Result = TypeVar("Result")


@dataclass(eq=False)  # not frozen, because a frozen dataclass is slower to create, and every layer and token has one
class Observation:
    """The input of a scorer: one layer after its attention and before its eviction.

    queries [B,H_q,M,D]: the rotated queries of this step, at query_positions [B,M]. keys, values [B,H_kv,T,D]: the
    stored tokens, at their original positions [B,H_kv,T]. seen [B]: number of tokens of each sequence so far. Position
    -1 is padding or an empty slot. evictable [B,H_kv,T] bool: tokens that are not protected, if `needs.evictable`.
    memory: data per sequence that a scorer's `observe` updates, if `needs.memory`. shared: data that scorers of several
    layers exchange. known: results that were computed once for this step.
    `kvbench.cache.group` combines several layers into one observation, whose sequences are the rows.
    """

    layer: int
    queries: Tensor
    query_positions: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    seen: Tensor
    phase: Phase
    params: AttentionParams
    window: QueryWindow | None = None
    slots: SlotInfo = field(default_factory=SlotInfo)
    sequences: SequenceInfo = field(default_factory=SequenceInfo)
    evictable: Tensor | None = None
    memory: Memory = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    known: StepCache = field(default_factory=dict, repr=False)

    @cached_property
    def occupied(self) -> Tensor:
        """[B,H_kv,T] bool: slots that hold a token."""
        return self.positions >= 0

    def scores(self, score: Callable[["Observation", State], Tensor], state: State, of_keys: bool) -> Tensor:
        """Scores [B,H_kv,T] float32 by a scorer's method; of_keys: it uses keys or values of each head."""
        return score(self, state)

    def once(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """The result stored under `key`, computed on first use for all policies. Do not modify it in place."""
        known: dict[Hashable, Any] = self.known  # few results are no tensors
        if key not in known:
            known[key] = compute()
        found: Result = known[key]
        return found

    # --- attention of the observation window; results are stored: do not modify them in place ------------------------
    def window_attention(self, window: int) -> Tensor:
        """Attention of the newest `window` queries, or of all if there are fewer: [B,H_kv,G,window,T] float32.

        Queries of a lookahead come in addition, as the last rows.
        """
        if ("rows", window) not in self.known:
            if window == 1 and self.sees_all and self.params.sinks is None:
                call = self.queries, self.keys, self.params.scaling, self.params.softcap, self.slots.bias
                found = attention_logits(*call).softmax(-1)
            else:
                rows, sight = self._rows_and_sight(window)
                found = rows if sight is None else rows * sight[:, :, None, :, None]
            self.known["rows", window] = found
        return self.known["rows", window]

    def window_sums(self, window: int) -> Tensor:
        """`window_attention` summed over the queries: [B,H_kv,G,T] float32."""
        if self._reduces(window):
            return self._by_kernel("sums", window)
        if ("rows", window) in self.known:
            return self.known["rows", window].sum(-2)
        rows, sight = self._rows_and_sight(window)
        if sight is None:
            return rows.sum(-2)
        return (sight[:, :, None, None].expand(-1, -1, rows.shape[2], -1, -1) @ rows).squeeze(-2)

    def window_mean(self, window: int) -> Tensor:
        """`window_sums` averaged over the query heads of a group: [B,H_kv,T] float32."""
        if self._reduces(window):
            return self._by_kernel("sums", window).mean(2)
        rows, sight = self._rows_and_sight(window)
        if sight is not None:
            return self.once(("mean", window), lambda: self.window_sums(window).mean(2))
        return self.once(("mean", window), lambda: rows.sum((2, 3)).div_(rows.shape[2]))

    def window_spread(self, statistic: Literal["variance", "entropy"], window: int) -> Tensor:
        """Per slot, [B,H_kv,G,T] float32: the unbiased variance of `window_attention` over its queries, or the slot's
        part of its entropy, summed over the queries.
        """
        if self._reduces(window):
            return self._by_kernel(statistic, window)
        compute = variance if statistic == "variance" else entropy
        return self.once((statistic, window), lambda: compute(self.window_attention(window)))

    def window_largest(self, window: int) -> Tensor | None:
        """The largest KV head's mean attention at each slot, summed over the window: [B,T]; only of a prompt.

        None where `window_attention` is no slower.
        """
        if not self._reduces(window):
            return None
        return window_largest(*self._window_call(window), self.params.sinks, self.slots.bias)

    def _reduces(self, window: int) -> bool:
        """Whether a kernel computes the statistics of a window without its rows: on GPUs, without a bias."""
        if self.slots.bias is not None:
            return False
        ahead = 0 if self.window is None else self.window.ahead
        return computes_window(self.queries, self.keys, window + ahead)

    def _by_kernel(self, statistic: Literal["sums", "variance", "entropy"], window: int) -> Tensor:
        """A statistic of the window. The variance and the entropy are computed in one launch with the sums."""
        if (statistic, window) not in self.known:
            found = window_statistics(*self._window_call(window), self.params.sinks, spread=statistic != "sums")
            self.known["sums", window] = found.sums
            if statistic != "sums":
                self.known["variance", window], self.known["entropy", window] = found.variances, found.entropies
        return self.known[statistic, window]

    def _rows_and_sight(self, window: int) -> tuple[Tensor, Tensor | None]:
        if ("weights", window) not in self.known:
            see_own = self.window is not None and self.window.see_own
            packed = self.slots.packed
            sinks = self.params.sinks if self.window is None else self.window.sinks(self.params.sinks, window)
            found = rows_and_sight(*self._window_call(window), packed, see_own, sinks, self.slots.bias)
            self.known["weights", window], sight = found
            if sight is not None:
                self.known["sight", window] = sight
        return self.known["weights", window], self.known.get(("sight", window))

    def _window_call(self, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float | None, int | None]:
        """The attention of the newest `window` queries, and of those of a lookahead, as arguments of kernels."""
        queries, positions = self.queries, self.query_positions
        if self.window is not None:
            queries, positions = self.window.newest(window)
        else:
            assert self.phase == "decode", "this scorer declares no window"
        return queries, self.keys, positions, self.positions, *self.params[:3]

    # --- attention of this step ------------------------------------------------------------------------------------
    @property
    def sees_all(self) -> bool:
        """Whether one decoded token sees all stored tokens, so that no mask is needed."""
        single = self.phase == "decode" and self.queries.shape[2] == 1
        return single and self.slots.packed and self.params.sliding_window is None

    def column_sums(self) -> Tensor:
        """Attention that every slot received from this step's queries: [B,H_kv,G,T] float32, in O(T) memory.

        The result is stored: do not modify it in place.
        """
        if ("column_sums", 0) not in self.known:
            if self.sees_all:
                return self.window_attention(1)[:, :, :, 0]
            self.known["column_sums", 0] = column_sums(*self._call, sinks=self.params.sinks, bias=self.slots.bias)
        return self.known["column_sums", 0]

    def moments(self) -> Moments:
        """First and second moments of the group's mean attention over this step's queries, [B,H_kv,T] each."""
        if self.sees_all or (("column_sums", 0) in self.known and self.queries.shape[2] == 1):
            mean = self.column_sums().mean(2)
            return Moments(mean, mean.square())
        if ("moment sums", 0) not in self.known:
            found = attention_moments(*self._call, sinks=self.params.sinks, bias=self.slots.bias)
            self.known["moment sums", 0], self.known["moment squares", 0] = found
        return Moments(self.known["moment sums", 0], self.known["moment squares", 0])

    @property
    def _call(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float | None, int | None]:
        """The attention of this step as arguments of kernels."""
        return self.queries, self.keys, self.query_positions, self.positions, *self.params[:3]

    # --- the model, if `needs.model` -------------------------------------------------------------------------------
    @property
    def model(self) -> ModelLayer:
        """The layer of the model: its rotation, and its output projection. ValueError for unsupported families."""
        assert self.params.model is not None, "this part does not declare needs.model"
        return self.params.model

    # --- tokens by position ----------------------------------------------------------------------------------------
    def newest(self, count: int) -> Tensor:
        """[B,H_kv,T] bool: the stored tokens among the newest `count` positions seen."""
        if ("newest", count) not in self.known:
            last = self.sequences.last
            if last is not None:
                newest = self.positions > last - count
            else:
                newest = self.positions >= (self.seen - count).to(self.positions.dtype)[:, None, None]
            # A prompt shorter than `count` puts the bound below 0, where empty slots would pass.
            self.known["newest", count] = newest if self.slots.packed else newest & self.occupied
        return self.known["newest", count]

    def first(self, count: int) -> Tensor:
        """[B,H_kv,T] bool: the stored tokens among the first `count` positions (sinks)."""
        if not self.slots.packed:
            return self.occupied & (self.positions < count)
        return self.once(("first", count), lambda: self.positions < count)
