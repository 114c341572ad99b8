"""The parts of an observation: parameters of the attention, query window, slots and sequences.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, T slots, D head dim.
"""

from collections.abc import Hashable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.policies.model_layer import Latents, ModelLayer

Phase = Literal["prompt", "block", "decode"]
State = dict[str, Tensor]
"""Running statistics of one layer, by name: [B,H_kv,T,G'] float32 aligned with the slots; G' = G or 1 (group mean)."""

Memory = dict[str, Tensor]
"""Data of a part for one layer between steps, by name: [B,...]. Its bytes count as held."""

StepCache = dict[Hashable, Tensor]
"""Results of a step that were computed already, by name and window, or by the part that computed them."""

MOVED = "moved"
"""Name of the statistic that counts how many positions a key was moved, if the schedule rotates kept keys again."""


class AttentionParams(NamedTuple):
    """Parameters of a layer's attention besides queries, keys and values."""

    scaling: float
    softcap: float | None = None
    sliding_window: int | None = None
    sinks: Tensor | None = None  # [1,H_q], or [B,H_q] if layers are stacked: logits of attention sinks
    model: ModelLayer | None = None  # if `needs.model`
    latents: Latents | None = None  # if the store holds latents

    @property
    def for_kernels(self) -> tuple[float, float | None, int | None, Tensor | None]:
        """Scaling, soft cap, sliding window and sinks [H_q], for a kernel, which attends one layer at a time."""
        assert self.sinks is None or len(self.sinks) == 1, "these are the sinks of several layers"
        return *self[:3], None if self.sinks is None else self.sinks[0]


class QueryWindow(NamedTuple):
    """The newest w queries [B,H_q,w,D] (w: the scorer's window) and their positions [B,w], oldest first, -1 = none.

    see_own: each query sees at least its own token, which is still stored. ahead: the last queries, of tokens after the
    prompt (`Lookahead`); they follow the window of any length. own [B,H_q,ahead]: log-sum-exp of their logits for these
    tokens themselves, if their softmax includes them.
    """

    queries: Tensor
    positions: Tensor
    see_own: bool = False
    ahead: int = 0
    own: Tensor | None = None

    def newest(self, count: int) -> tuple[Tensor, Tensor]:
        """Up to `count` newest queries [B,H_q,w,D], oldest first, then those of a lookahead; their positions [B,w]."""
        count += self.ahead
        if self.queries.shape[2] <= count:
            return self.queries, self.positions
        return self.queries[:, :, -count:], self.positions[:, -count:]

    def sinks(self, sinks: Tensor | None, window: int) -> Tensor | None:
        """Logits without a slot: the model's sinks [B,H_q], or of each of the queries [B,H_q,w] with those of `own`."""
        if self.own is None:
            return sinks
        before = min(window + self.ahead, self.queries.shape[2]) - self.ahead
        own = F.pad(self.own, (before, 0), value=-torch.inf)
        return own if sinks is None else own.logaddexp(sinks.to(own.dtype)[..., None])


class SlotInfo(NamedTuple):
    """Properties of a layer's slots.

    ascending: slots are in order of position, empty ones last. packed: no slot is empty, so masks can be skipped.
    whole: nothing was evicted, so slot i of every head holds token i. bias [B,H_kv,T]: added to the logits of a slot.
    moved [B,H_kv,T]: how many positions each key was moved since it was stored.
    """

    ascending: bool = True
    packed: bool = False
    whole: bool = True
    bias: Tensor | None = None
    moved: Tensor | None = None


class SequenceInfo(NamedTuple):
    """Properties of the sequences of a step.

    last: the position of the newest token, if the host has it and all sequences have the same. opens: whether a block
    (prompt, decoded token) begins in this step. budgets: the layer's slots per KV head; the mean until an allocator has
    divided the budget. Numbers that a part declares (`Needs.reads`): prompts: prompt length with all earlier tokens;
    begins: position of the first token of the newest prompt; questions: position of its question, if `needs.question`.
    """

    last: int | None = None
    opens: tuple[bool, ...] = ()
    budgets: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    begins: tuple[int, ...] = ()
    questions: tuple[int, ...] = ()


def known_weights(weights: Tensor) -> StepCache:
    """The results that the attention weights [B,H_kv,G,1,T] of a decoded token are, so that none is computed again."""
    return {("column_sums", 0): weights[:, :, :, 0], ("rows", 1): weights}
