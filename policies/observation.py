"""What a policy may look at: one layer's queries, keys and values at the moment of a possible eviction.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M new queries, T slots, D head dim.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.decode import decode_attention, decodes
from kvbench.kernels.prompt import one_for_all, prompt_attention
from kvbench.kernels.query_sums import (
    MOST_QUERIES,
    Moments,
    attention_moments,
    column_sums,
    entropy,
    variance,
    window_largest,
    window_statistics,
)
from kvbench.kernels.references import FEW_QUERIES, Attended, attention_logits, rows_and_sight
from kvbench.kernels.tiles import use_triton
from kvbench.policies.constants import on_device
from kvbench.policies.model_layer import Latents, ModelLayer, Rotation
from kvbench.policies.ranking import protected

Phase = Literal["prompt", "block", "decode"]
State = dict[str, Tensor]
"""Running statistics of one layer, by name: [B,H_kv,T,G'] float32 aligned with the slots; G' = G or 1 (group mean)."""

Memory = dict[str, Tensor]
"""What a part remembers of a layer between steps, by name: [B,...] per sequence, of one shape; held bytes count it."""

StepCache = dict[Hashable, Tensor]
"""What was computed of a step already: by name and window, or by the part that computed it."""


MOVED = "moved"
"""The statistic that says how many places a token's key was moved on, where a schedule rotates kept keys anew."""


class AttentionParams(NamedTuple):
    """What the model asks of its attention besides queries, keys and values."""

    scaling: float
    softcap: float | None = None
    sliding_window: int | None = None
    sinks: Tensor | None = None  # [1,H_q] logits that take probability and hold no token
    model: ModelLayer | None = None  # where a policy needs it
    latents: Latents | None = None  # where the store holds latents


@dataclass(eq=False)  # not frozen: of so many fields that takes four times as long, in every layer of a step
class Observation:
    """One layer after its attention, before its eviction. Pure data: nothing here changes the model or the cache.

    queries [B,H_q,M,D] are the rotated queries of this step at query_positions [B,M]; recent_queries [B,H_q,w,D] at
    recent_positions [B,w] the newest w so far, oldest first (w = the scorer's window). keys, values [B,H_kv,T,D] lie at
    the original positions [B,H_kv,T]; seen [B] counts the tokens each sequence has shown. -1 = padding, empty slot.
    budgets are the mean while not yet allocated; prompts: tokens of each sequence's prompt, all before it included;
    questions: at which position its question begins, where `needs.question`.
    Several layers may be shown as one: `kvbench.policies.stacked`.
    """

    layer: int
    queries: Tensor
    query_positions: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    seen: Tensor
    scaling: float
    phase: Phase
    recent_queries: Tensor | None = None
    recent_positions: Tensor | None = None
    sighted: bool = False  # each of the recent queries sees a token: its own is still stored
    softcap: float | None = None
    sliding_window: int | None = None
    sinks: Tensor | None = None  # [B or 1,H_q] logits of attention sinks
    model: ModelLayer | None = None  # where `needs.model`
    memory: Memory = field(default_factory=dict)  # where `needs.memory`: a scorer's `observe` changes and fills it
    bias: Tensor | None = None  # [B,H_kv,T] added to the logits of a slot
    evictable: Tensor | None = None  # bool [B,H_kv,T], tokens that are not protected, where `needs.evictable`
    moved: Tensor | None = None  # [B,H_kv,T] how many places keys were moved on since they were stored
    ascending: bool = True  # slots are in order of position, empty ones last
    packed: bool = False  # no slot is empty: masks may be skipped
    aligned: bool = False  # all sequences are at the same position and nothing is padded
    last: int | None = None  # this position, where the host knows it
    whole: bool = True  # nothing was evicted yet: slot i of every head holds token i
    opens: tuple[bool, ...] = ()  # sequences whose block (prompt, token) begins here
    budgets: tuple[int, ...] = ()  # this layer's slots per KV head for each sequence
    prompts: tuple[int, ...] = ()
    questions: tuple[int, ...] = ()
    # What scorers of several layers tell each other, and what was computed once.
    shared: dict[str, Tensor] = field(default_factory=dict)
    _known: StepCache = field(default_factory=dict, init=False, repr=False)

    def knowing(self, known: StepCache) -> "Observation":
        """This observation, with what others computed of the same queries, keys and values; they learn from it too."""
        self._known = known
        return self

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.keys.shape[1]

    @property
    def ratings(self) -> Tensor | None:
        """[B,M] float32: what a pre-pass (`TokenRating`) made of the logits of this step's tokens, once known."""
        return self.shared.get("ratings")

    @cached_property
    def occupied(self) -> Tensor:
        """[B,H_kv,T] bool: slots that hold a token."""
        return self.positions >= 0

    def scores(self, score: Callable[["Observation", State], Tensor], state: State, of_keys: bool) -> Tensor:
        """What a scorer makes of the layer, [B,H_kv,T] float32; of_keys: it reads keys or values themselves."""
        return score(self, state)

    def window_attention(self, window: int) -> Tensor:
        """Rows of the newest `window` queries (or fewer, if fewer were seen): [B,H_kv,G,window,T] float32.

        Computed once; not to be changed in place.
        """
        return self.once(("rows", window), lambda: self._window_attention(window))

    def window_sums(self, window: int) -> Tensor:
        """The same rows summed over their queries: [B,H_kv,G,T] float32."""
        if self.reduces(window):
            return self._reduced("sums", window)
        if ("rows", window) in self._known:
            return self._known["rows", window].sum(-2)
        rows, sight = self._rows_and_sight(window)
        if sight is None:
            return rows.sum(-2)
        return (sight[:, :, None, None].expand(-1, -1, rows.shape[2], -1, -1) @ rows).squeeze(-2)

    def window_mean(self, window: int) -> Tensor:
        """These sums averaged over the query heads of a group: [B,H_kv,T] float32. Not to be changed in place."""
        if self.reduces(window):
            return self._reduced("sums", window).mean(2)
        if ("mean", window) not in self._known:
            rows, sight = self._rows_and_sight(window)
            mean = self.window_sums(window).mean(2) if sight is not None else rows.sum((2, 3)).div_(self.group)
            self._known["mean", window] = mean
        return self._known["mean", window]

    def window_length(self, window: int) -> int:
        """Rows of the window: `window`, or fewer where fewer queries were seen."""
        return self._newest_queries(window)[0].shape[2]

    def window_variance(self, window: int) -> Tensor:
        """Unbiased variance of these rows over their queries: [B,H_kv,G,T] float32."""
        if self.reduces(window):
            return self._reduced("variance", window)
        return self._statistic(variance, window)

    def window_entropy(self, window: int) -> Tensor:
        """Each slot's part of the entropies of these rows, summed over the queries: [B,H_kv,G,T] float32."""
        if self.reduces(window):
            return self._reduced("entropy", window)
        return self._statistic(entropy, window)

    def _statistic(self, statistic: Callable[[Tensor], Tensor], window: int) -> Tensor:
        return self.once((statistic.__name__, window), lambda: statistic(self.window_attention(window)))

    def once(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """What `key` says of this step, computed for all variants that ask for it. Not to be changed in place."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def window_largest(self, window: int) -> Tensor:
        """The largest KV head's mean attention at each slot, summed over the window: [B,T]; of a prompt only."""
        queries, positions = self._newest_queries(window)
        call = queries, self.keys, positions, self.positions, self.scaling, self.softcap, self.sliding_window
        return window_largest(*call, self.sinks, self.bias)

    def reduces(self, window: int) -> bool:
        """Whether statistics of a window come from the kernel that keeps no rows: on GPUs, without a bias."""
        return self.bias is None and 1 < window <= MOST_QUERIES and use_triton(self.queries) and use_triton(self.keys)

    def _reduced(self, statistic: Literal["sums", "variance", "entropy"], window: int) -> Tensor:
        """One of the window's statistics; with the variance, or the entropy, come all three."""
        if (statistic, window) not in self._known:
            queries, positions = self._newest_queries(window)
            call = queries, self.keys, positions, self.positions, self.scaling, self.softcap, self.sliding_window
            found = window_statistics(*call, self.sinks, spread=statistic != "sums")
            self._known["sums", window] = found.sums
            if statistic != "sums":
                self._known["variance", window], self._known["entropy", window] = found.variances, found.entropies
        return self._known[statistic, window]

    @property
    def known_row(self) -> Tensor | None:
        """Attention of the newest query, [B,H_kv,G,1,T], if somebody asked for it already."""
        return self._known.get(("rows", 1))

    def forget(self) -> None:
        """Let go of everything that was computed once."""
        self._known.clear()

    def _window_attention(self, window: int) -> Tensor:
        if window == 1 and self.sees_all and self.sinks is None:
            return attention_logits(self.queries, self.keys, self.scaling, self.softcap, self.bias).softmax(-1)
        rows, sight = self._rows_and_sight(window)
        return rows if sight is None else rows * sight[:, :, None, :, None]

    def _rows_and_sight(self, window: int) -> tuple[Tensor, Tensor | None]:
        if ("weights", window) not in self._known:
            queries, positions = self._newest_queries(window)
            self._known["weights", window], sight = rows_and_sight(
                queries,
                self.keys,
                positions,
                self.positions,
                self.scaling,
                self.softcap,
                self.sliding_window,
                self.packed,
                self.sighted,
                self.sinks,
                self.bias,
            )
            if sight is not None:
                self._known["sight", window] = sight
        return self._known["weights", window], self._known.get(("sight", window))

    def _newest_queries(self, window: int) -> tuple[Tensor, Tensor]:
        """Up to `window` newest queries [B,H_q,w,D] and their positions [B,w], oldest first."""
        queries, positions = self.recent_queries, self.recent_positions
        if queries is None or positions is None:
            assert self.phase == "decode", "this scorer declares no window"
            return self.queries, self.query_positions
        if queries.shape[2] > window:
            queries, positions = queries[:, :, -window:], positions[:, -window:]
        return queries, positions

    @property
    def sees_all(self) -> bool:
        """One decoded token that sees all that is stored: no mask, which on a CPU costs as much as the softmax."""
        return self.phase == "decode" and self.packed and self.sliding_window is None and self.queries.shape[2] == 1

    def attend_newest(self) -> Tensor | None:
        """Attention output [B,H_q,1,D] of a decoded token, by a kernel that hands out its weights with it.

        `window_attention(1)`, `column_sums` and `moments` then cost nothing more. None where there is no such kernel.
        """
        if self.phase != "decode" or not decodes(self.queries):
            return None
        packed = self.aligned and self.sees_all
        places: tuple[Tensor | None, Tensor | None] = (None, None) if packed else (self.query_positions, self.positions)
        how = (*places, self.scaling, self.softcap, self.sliding_window, one_for_all(self.sinks))
        attention = decode_attention(
            self.queries, self.keys, self.values, *how, packed=packed, weights=True, bias=self.bias
        )
        assert attention.weights is not None
        self.told(attention.weights)
        return attention.out

    def told(self, weights: Tensor) -> None:
        """The attention [B,H_kv,G,1,T] that a decoded token paid is known: nobody computes it again."""
        self._known["column_sums", 0] = weights[:, :, :, 0]
        if (
            self.aligned or self.recent_queries is None
        ):  # a sequence without a token has an older query that is its newest
            self._known["rows", 1] = weights

    def column_sums(self) -> Tensor:
        """Attention every slot drew from this step's queries: [B,H_kv,G,T] float32, in O(T) memory.

        Computed once, as the moments are; not to be changed in place.
        """
        if ("column_sums", 0) not in self._known:
            if self.sees_all:
                return self.window_attention(1)[:, :, :, 0]
            self._known["column_sums", 0] = column_sums(*self._call, sinks=self.sinks, bias=self.bias)
        return self._known["column_sums", 0]

    def moments(self) -> Moments:
        """First and second moments of the group's mean attention over this step's queries, [B,H_kv,T] each."""
        if self.sees_all or (("column_sums", 0) in self._known and self.queries.shape[2] == 1):
            mean = self.column_sums().mean(2)
            return Moments(mean, mean.square())
        if ("first", 0) not in self._known:
            self._known["first", 0], self._known["second", 0] = attention_moments(
                *self._call, sinks=self.sinks, bias=self.bias
            )
        return Moments(self._known["first", 0], self._known["second", 0])

    def attend_and_sum(self, statistic: Literal["column_sums", "moments"]) -> Tensor | None:
        """Attention output of this step, [B,H_q,M,D], with the statistic, which then is known.

        On a CPU both come out of the same rows, most of the price of either; on a GPU the statistic takes one more pass
        from the attention's log-sum-exp. None where attention has a better way: for a few queries, with a bias, where
        gradients are asked for, and in 16 bits on a CPU: there PyTorch's attention rounds otherwise than rows do, and
        what a policy keeps would depend on whether another one that sums reads the same prompt.
        """
        queries, values = self.queries, self.values
        if (
            self.bias is not None
            or queries.shape[2] <= FEW_QUERIES
            or (torch.is_grad_enabled() and queries.requires_grad)
        ):
            return None
        if use_triton(queries) and use_triton(values):
            return self._attend_then_sum(statistic)
        if queries.element_size() == 2:
            return None
        attended = Attended(values, values.new_zeros(*queries.shape[:3], values.shape[-1]))
        if statistic == "moments":
            found = attention_moments(*self._call, attended, sinks=self.sinks)
            self._known["first", 0], self._known["second", 0] = found
        else:
            self._known["column_sums", 0] = column_sums(*self._call, sinks=self.sinks, attended=attended)
        return attended.out

    def _attend_then_sum(self, statistic: Literal["column_sums", "moments"]) -> Tensor:
        """The same by kernels: the attention and its log-sum-exp, then the statistic."""
        queries, keys, *_ = self._call
        how = (*self._call[2:], one_for_all(self.sinks), self._in_order)
        out, log_sum_exp, _ = prompt_attention(queries, keys, self.values, *how)
        if statistic == "moments":
            found = attention_moments(*self._call, log_sum_exp=log_sum_exp, aligned=self._in_order)
            self._known["first", 0], self._known["second", 0] = found
        else:
            self._known["column_sums", 0] = column_sums(*self._call, log_sum_exp, self._in_order)
        return out

    @property
    def _in_order(self) -> bool:
        """Whether slots hold tokens in order, all of them, this step's last: who sees whom then needs no positions.

        Asked where the queries are all of the step's (a store may look at some of them alone). A sliding window counts
        positions, which are slots only as long as nothing was evicted.
        """
        if self.last is None or not (self.ascending and self.packed):
            return False
        return self.sliding_window is None or self.positions.shape[2] == self.last + 1

    @property
    def _call(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float | None, int | None]:
        """This step's attention as kernels take it."""
        positions = self.query_positions, self.positions
        return self.queries, self.keys, *positions, self.scaling, self.softcap, self.sliding_window

    def rotation(self, positions: Tensor) -> Rotation:
        """How this layer rotates queries and keys at positions [B,H,n]; where `needs.model`, as all that follows.

        ValueError, in one sentence, for a family whose rotation cannot be told.
        """
        assert self.model is not None, "this scorer does not declare that it reads the model"
        return self.model.rotation(positions.clamp(min=0))

    def unrotated_keys(self) -> Tensor:
        """The stored keys as they were before their rotation, [B,H_kv,T,D] float32."""
        positions = self.positions[:, :1] if self.whole else self.positions
        if self.moved is not None and not self.whole:
            positions = positions + self.moved.to(positions.dtype)
        return self.once("unrotated keys", lambda: self.rotation(positions).inverse().apply(self.keys))

    def unrotated_queries(self) -> Tensor:
        """This step's queries as they were before their rotation, [B,H_q,M,D] float32."""
        return self.rotation(self.query_positions[:, None]).inverse().apply(self.queries)

    def output_projection(self) -> Tensor:
        """The layer's output projection by query heads, [H_q,D,hidden]. ValueError where a family has none."""
        assert self.model is not None, "this part does not declare that it reads the model"
        return self.model.output_projection()

    def newest(self, count: int) -> Tensor:
        """[B,H_kv,T] bool: the stored tokens among the newest `count` positions seen."""
        if ("newest", count) not in self._known:
            if self.last is not None:
                newest = self.positions > self.last - count
            else:
                newest = self.positions >= (self.seen - count).to(self.positions.dtype)[:, None, None]
            # A prompt shorter than `count` puts the bound below 0, where empty slots would pass.
            self._known["newest", count] = newest if self.packed else newest & self.occupied
        return self._known["newest", count]

    def first(self, count: int) -> Tensor:
        """[B,H_kv,T] bool: the stored tokens among the first `count` positions (sinks)."""
        return self.positions < count if self.packed else self.occupied & (self.positions < count)

    def protected(self, first: Sequence[int], newest: Sequence[int]) -> Tensor:
        """[B,H_kv,T] bool: the stored tokens among the first and the newest positions, counts per sequence."""
        if len(set(first)) > 1 or (len(set(newest)) > 1 and self.last is None):
            return protected(self.positions, self.seen, first, newest)
        recent = self.newest(newest[0]) if len(set(newest)) == 1 else self._newest_of_each(newest)
        if first[0] and any(newest):
            return recent | self.first(first[0])
        return self.first(first[0]) if first[0] else recent

    def _newest_of_each(self, counts: Sequence[int]) -> Tensor:
        """The same as `newest` with a count per sequence, all of which are at the same position."""
        assert self.last is not None
        bounds = self.last + 1 - on_device(tuple(counts), self.positions.device)
        return self.positions >= bounds.clamp_(min=0)[:, None, None]
