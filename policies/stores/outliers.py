"""OTT's pools: which tokens are traced, and their exact keys and values.

Shapes: B batch, H KV heads, T new tokens, m groups of G tokens, n pool capacity, A auxiliary capacity, D head dim.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import widen
from kvbench.kernels.jit import use_triton
from kvbench.kernels.quantise import LARGEST_GROUP, Filled
from kvbench.policies.contents import saved
from kvbench.policies.draws import uniform_draws
from kvbench.policies.stores.slots import take


@saved
@dataclass(frozen=True)
class Tracing:
    """How tokens compete for the pool: the lowest `score` stays, ties go to the earlier token.

    capacity, auxiliary: entries per KV head. norm: of the key, l1 or l2. trace: the smallest keys, the largest, or a
    random choice. fill: what stands in for a traced token in its group, the mean of all its tokens or of the others.
    on_evict: defeated tokens stay exact in the auxiliary pool, or are discarded. scope: every KV head has its own
    tokens, or all heads of a layer share them (scores summed). joint: the prompt is one competition, not one per group.
    """

    capacity: int
    auxiliary: int
    norm: Literal["l1", "l2"] = "l1"
    trace: Literal["smallest", "largest", "random"] = "smallest"
    fill: Literal["mean", "inlier_mean"] = "mean"
    on_evict: Literal["pool", "discard"] = "pool"
    scope: Literal["head", "layer"] = "head"
    joint: bool = False
    seed: int = 0

    @property
    def entries(self) -> int:
        """Slots per KV head of both pools."""
        return self.capacity + (self.auxiliary if self.on_evict == "pool" else 0)

    def scores(self, keys: Tensor, slots: Tensor) -> Tensor:
        """[B,H,T] float32 of keys [B,H,T,D] at slots [B,H,T]; lower = more of an outlier."""
        if self.trace == "random":
            scores = uniform_draws(self.seed, 0, slots)
        else:
            scores = torch.linalg.vector_norm(widen(keys), ord=1 if self.norm == "l1" else 2, dim=-1)
            scores = -scores if self.trace == "largest" else scores
        return scores.sum(1, keepdim=True).expand_as(scores) if self.scope == "layer" else scores


class Competition:
    """The pools while groups compete, as entry numbers: those held before come first, then the new tokens.

    pool [B,H,n] with its scores, in order of score (infinite: empty); spare [B,H,A], of which `used` are filled;
    frozen [B,H]: nothing changes any more.
    """

    def __init__(self, tracing: Tracing, scores: Tensor, spare: Tensor, frozen: Tensor) -> None:
        self.tracing = tracing
        self.scores = scores
        self.pool = torch.arange(tracing.capacity, device=scores.device).expand_as(scores)
        ids = torch.arange(spare.shape[-1], device=scores.device) + tracing.capacity
        self.spare = torch.where(spare, ids, -1)
        self.used = spare.sum(-1)
        self.frozen = frozen

    def step(self, scores: Tensor, ids: Tensor, active: Tensor) -> Tensor:
        """One group's best candidates [B,H,n'] compete in active heads [B,H]; returns which of them were admitted."""
        capacity = self.tracing.capacity
        both = torch.cat([self.scores, scores], dim=-1)
        order = both.argsort(dim=-1, stable=True)  # incumbents stand first, so they win ties
        winners, losers = order[..., :capacity], order[..., capacity:]
        defeated = (losers < capacity) & both.gather(-1, losers).isfinite()
        if self.tracing.on_evict == "pool":
            overflow = self.used + defeated.sum(-1) > self.spare.shape[-1]
            self.frozen = self.frozen | (overflow & active)
            active = active & ~self.frozen
            self._retire(self.pool.gather(-1, losers.clamp(max=capacity - 1)), defeated & active[..., None])
        admitted = torch.zeros_like(both, dtype=torch.bool).scatter_(-1, winners, True)[..., capacity:]
        admitted &= scores.isfinite() & active[..., None]
        chosen = torch.cat([self.pool, ids], dim=-1).gather(-1, winners)
        self.pool = torch.where(active[..., None], chosen, self.pool)
        self.scores = torch.where(active[..., None], both.gather(-1, winners), self.scores)
        return admitted

    def _retire(self, ids: Tensor, defeated: Tensor) -> None:
        """Put the defeated into the next free auxiliary slots."""
        room = self.spare.shape[-1]
        slots = (self.used[..., None] + defeated.cumsum(-1) - 1).masked_fill(~defeated, room)
        self.spare = torch.nn.functional.pad(self.spare, (0, 1)).scatter(-1, slots, ids)[..., :room]
        self.used = self.used + defeated.sum(-1)


@saved
class Pools:
    """Traced tokens of one layer: exact keys and values [B,H,n+A,D] at slots [B,H,n+A] (-1: empty), the pool first."""

    def __init__(self, tracing: Tracing, keys: Tensor, values: Tensor) -> None:
        self.tracing = tracing
        batch, heads = keys.shape[:2]
        size = (batch, heads, tracing.entries)
        self.keys = keys.new_zeros(*size, keys.shape[-1])
        self.values = values.new_zeros(*size, values.shape[-1])
        self.slots = torch.full(size, -1, dtype=torch.int32, device=keys.device)
        self.frozen = torch.zeros(batch, heads, dtype=torch.bool, device=keys.device)
        self._fresh = True

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values, self.slots, self.frozen))

    def trace(
        self, keys: Tensor, values: Tensor, group: int, first: Tensor, counts: Tensor | None
    ) -> list[tuple[Tensor, Filled | None]]:
        """Let new tokens [B,H,m*G,D] compete, group by group, oldest first; returns both with traced ones filled in.

        Where the kernel that quantises them fills them in itself: returns them as they are, and what it needs for that.

        first [B,H]: slot of each head's first new token; counts [B,H]: only the first so many of each head are there.
        """
        check_finite_tokens(keys, values)
        steps = torch.arange(keys.shape[2], device=keys.device)
        slots = first[..., None] + steps
        scores = self.tracing.scores(keys, slots)
        if counts is not None:
            scores = scores.masked_fill(steps >= counts[..., None], torch.inf)
        span = keys.shape[2] if self.tracing.joint and self._fresh else group
        traced = self._compete(scores.unflatten(-1, (-1, span)), keys, values, slots).view(*keys.shape[:2], -1, group)
        self._fresh = False
        return [self._filled(x, traced) for x in (keys, values)]

    def _compete(self, scores: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        """Update the pools with groups of scores [B,H,m,span]; returns which new tokens were admitted, same shape."""
        capacity, entries = self.tracing.capacity, self.tracing.entries
        held = self.tracing.scores(self.keys[:, :, :capacity], self.slots[..., :capacity])
        contest = Competition(
            self.tracing,
            held.masked_fill(self.slots[..., :capacity] < 0, torch.inf),
            self.slots[..., capacity:] >= 0,
            self.frozen,
        )
        best = scores.argsort(dim=-1, stable=True)[..., :capacity]
        lowest = scores.gather(-1, best)
        offsets = torch.arange(scores.shape[2], device=scores.device)[:, None] * scores.shape[3]
        ids = best + offsets + entries
        traced = torch.zeros_like(scores, dtype=torch.bool)
        for g in range(
            scores.shape[2] if not scores.is_meta else 0
        ):  # without data nobody wins, in any number of steps
            active = lowest[:, :, g, 0].isfinite() & ~contest.frozen
            admitted = contest.step(lowest[:, :, g], ids[:, :, g], active)
            traced[:, :, g].scatter_(-1, best[:, :, g], admitted)
        self._take(contest, keys, values, slots)
        return traced

    def _take(self, contest: Competition, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Hold what the competition ended with."""
        entries = self.tracing.entries
        ids = contest.pool.masked_fill(~contest.scores.isfinite(), -1)
        ids = torch.cat([ids, contest.spare], dim=-1) if self.tracing.on_evict == "pool" else ids
        old, new = ids.clamp(0, entries - 1), (ids - entries).clamp(min=0)
        is_new = ids >= entries
        for name, x in (("keys", keys), ("values", values)):
            here = torch.where(is_new[..., None], take(x, new), take(getattr(self, name), old))
            setattr(self, name, here.masked_fill_((ids < 0)[..., None], 0))
        places = torch.where(is_new, slots.gather(-1, new), self.slots.gather(-1, old))
        self.slots = places.masked_fill_(ids < 0, -1).to(torch.int32)
        self.frozen = contest.frozen

    def _filled(self, tokens: Tensor, traced: Tensor) -> tuple[Tensor, Filled | None]:
        """tokens [B,H,m*G,D] with traced ones [B,H,m,G] replaced by their group's mean, float32."""
        group = traced.shape[-1]
        x = widen(tokens).unflatten(2, (-1, group))
        if self.tracing.fill == "mean":
            mean = x.mean(3, keepdim=True)
        else:
            inlier = ~traced[..., None] | traced.all(-1)[..., None, None]
            mean = (x * inlier).sum(3, keepdim=True) / inlier.sum(3, keepdim=True)
        if use_triton(tokens) and max(group, x.shape[-1]) <= LARGEST_GROUP:
            return tokens, Filled(traced.flatten(2), mean[:, :, :, 0], group)
        return torch.where(traced[..., None], mean, x).flatten(2, 3), None

    # --- attention: the traced tokens take their slots' places ------------------------------------------------------
    def cover(self, x: Tensor, exact: Tensor) -> Tensor:
        """x [B,H,C,D] with the exact rows [B,H,n+A,D] written at their slots."""
        padded = torch.nn.functional.pad(x, (0, 0, 0, 1))
        slots = self._slots(x.shape[2])[..., None].expand(-1, -1, -1, x.shape[-1])
        return padded.scatter_(2, slots, exact)[:, :, :-1]

    def cover_logits(self, logits: Tensor, rows: Tensor) -> Tensor:
        """logits [B,H,r,C] with those of traced tokens computed from their exact keys."""
        exact = rows @ widen(self.keys).transpose(-1, -2)
        padded = torch.nn.functional.pad(logits, (0, 1))
        slots = self._slots(logits.shape[-1])[:, :, None].expand_as(exact)
        return padded.scatter_(-1, slots, exact)[..., :-1]

    def uncover(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """weights [B,H,r,C] without those of traced tokens, and what these add to the output, [B,H,r,D]."""
        padded = torch.nn.functional.pad(weights, (0, 1))
        slots = self._slots(weights.shape[-1])[:, :, None].expand(-1, -1, weights.shape[2], -1)
        output = padded.gather(-1, slots) @ widen(self.values)
        return padded.scatter_(-1, slots, 0.0)[..., :-1], output

    def _slots(self, width: int) -> Tensor:
        """[B,H,n+A] slots; empty entries point behind the last one."""
        return self.slots.long().masked_fill(self.slots < 0, width)


def check_finite_tokens(*tokens: Tensor) -> None:
    """ValueError where a token to be quantised is not finite: a traced one would else go unnoticed."""
    for x in tokens:
        if not x.is_meta and not bool(x.isfinite().all()):
            raise ValueError("keys or values to be quantised contain NaN or infinity")
