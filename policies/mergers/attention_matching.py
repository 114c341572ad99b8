"""Attention matching: a bias and values for the kept tokens, so that reference queries read what they read before.

Shapes: B batch, H KV heads, G query heads per KV head, W queries of the window, R = G * W rows, T slots, n kept slots
(of the head that has most), D head dim.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.references import attention_logits, visible, widen
from kvbench.policies.checks import number, whole_number
from kvbench.policies.mergers.merger import Eviction, Merged, Merger, MergeState, OneEviction, in_order
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation
from kvbench.policies.stores.slots import take

NEVER = 1e-12  # the least weight of a slot: its bias stays a number


@dataclass(frozen=True)
class AttentionMatching(Merger):
    """Kept keys stay; each gets a bias b, so that attention's mass matches, and a new value, so that outputs match.

        b_i = log w_i, w = argmin_(w >= 0) sum_q (sum_(i in "kept") w_i m_(q,i) - 1)^2, m_(q,i) = e^(q k_i) / Z_q

    Z_q is the mass of all tokens, sum_j e^(q k_j). With o_q the attention output of reference query q over all of them,
    and p_q its softmax over the kept ones, bias included:

        v = argmin_v sum_q ||sum_(i in "kept") p_(q,i) v_i - o_q||^2 + ridge * sum_i ||v_i - v_i^"old"||^2

    Reference queries are the newest `queries` of the prompt, in all query heads of a group; tokens that not all of them
    see stay as they are. Fitted where a prompt, or a block of it, is evicted; tokens that decoding evicts just go.
    Later tokens have bias 0.

    queries: newest queries that are matched. steps: of the non-negative least squares, by accelerated projected
    gradients from w = 1. ridge: how strongly values stay near their own; it decides where rows are fewer than tokens.
    Source: Zweiger et al. 2026, arXiv 2602.16284: its simplest form, of chosen keys (others are searched for there), of
    the context's own queries (it also has the model repeat the context), with a ridge of ours.
    """

    queries: int = 64
    steps: int = 300
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        whole_number("queries", self.queries, 1)
        whole_number("steps", self.steps, 0)
        number("ridge", self.ridge, NEVER)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs(window=self.queries, bias=True)

    def absorb(self, eviction: Eviction, memory: MergeState) -> Merged | None:
        if eviction.phase == "decode":
            return None
        assert eviction.seen is not None, "several tokens go at the end of a prompt or a block"
        kept = in_order(eviction.kept, eviction.positions)
        asked = reference_rows(eviction.seen, self.queries)
        values = widen(eviction.values).masked_fill((eviction.positions < 0)[..., None], 0.0)
        own = take(values, kept.slots)
        free = eviction.positions.gather(-1, kept.slots) <= asked.oldest[:, None, None]
        free &= kept.present & eviction.evicted.any(-1, keepdim=True)
        index = kept.slots[:, :, None].expand(-1, -1, asked.logits.shape[2], -1)
        rows = asked.logits.gather(-1, index).masked_fill(~kept.present[:, :, None], -torch.inf)
        real = asked.real * (rows > -torch.inf).any(-1, keepdim=True)  # a query that sees no kept token fits nothing
        weights = mass_weights((rows - asked.log_masses).exp(), real, free, self.steps)
        fitted = (rows + weights.log()[:, :, None]).softmax(-1).nan_to_num(nan=0.0) * real
        wanted = (asked.logits.softmax(-1) @ values) * real - fitted @ own
        moved = own + ridge_solution(fitted * free[:, :, None], wanted, self.ridge)
        bias = weights.log().float()
        if eviction.seen.bias is not None:
            bias += eviction.seen.bias.gather(-1, kept.slots)
        # Entries beyond a head's own number write an evicted slot, which goes.
        return Merged(kept.slots, take(eviction.keys, kept.slots), moved.to(eviction.values.dtype), bias)

    def absorb_one(self, eviction: OneEviction, memory: MergeState) -> None:
        return None


class Rows(NamedTuple):
    """Reference queries: logits [B,H,R,T], -inf where one does not see a slot, and their log-sum-exp [B,H,R,1].

    real [B,1,R,1]: 1, or 0 for rows that are padding, whose logits are 0. oldest [B]: the first position of a query.
    """

    logits: Tensor
    log_masses: Tensor
    real: Tensor
    oldest: Tensor


def reference_rows(seen: Observation, queries: int) -> Rows:
    """The newest queries of what was observed, all query heads of a group."""
    assert seen.recent_queries is not None, "the merger needs a window"
    assert seen.recent_positions is not None, "the merger needs a window"
    asked, places = seen.recent_queries[:, :, -queries:], seen.recent_positions[:, -queries:]
    logits = attention_logits(asked, seen.keys, seen.scaling, seen.softcap, seen.bias)
    sight = visible(places, seen.positions, seen.sliding_window)
    nothing = ~sight.any(1, keepdim=True).any(-1, keepdim=True)
    logits = logits.masked_fill(~(sight | nothing)[:, :, None], -torch.inf).flatten(2, 3)
    real = (places >= 0)[:, None, :, None].repeat(1, 1, asked.shape[1] // seen.keys.shape[1], 1)
    oldest = places.masked_fill(places < 0, torch.iinfo(places.dtype).max).amin(-1)
    return Rows(logits, logits.logsumexp(-1, keepdim=True), real.to(logits.dtype), oldest)


def mass_weights(masses: Tensor, real: Tensor, free: Tensor, steps: int) -> Tensor:
    """Weights w >= 0 [B,H,n], 1 where not `free`, with which masses [B,H,R,n] of real rows [B,H,R,1] add up to 1.

    argmin |masses w - 1|^2 by accelerated projected gradients (FISTA, Beck and Teboulle 2009) from 1; a step is 1 over
    the largest row sum of A^T A, which bounds its eigenvalues.
    """
    masses = masses * real
    gram = masses.transpose(-1, -2) @ masses
    towards = (masses.transpose(-1, -2) @ real.expand(*masses.shape[:3], 1))[..., 0]
    size = gram.sum(-1).amax(-1, keepdim=True).clamp(min=NEVER)
    weights = point = torch.ones_like(towards)
    speed = 1.0
    for _ in range(steps):
        found = point - ((gram @ point[..., None])[..., 0] - towards) / size
        found = torch.where(free, found.clamp(min=NEVER), 1.0)
        following = (1 + (1 + 4 * speed**2) ** 0.5) / 2
        point = found + (speed - 1) / following * (found - weights)
        weights, speed = found, following
    return weights


def ridge_solution(rows: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    """x [B,H,n,D] that minimises |rows x - wanted|^2 + ridge |x|^2; rows [B,H,R,n], wanted [B,H,R,D]. In float64.

    Solved over the rows, which are fewer than tokens as a rule: x = rows^T (rows rows^T + ridge I)^-1 wanted.
    """
    wide = rows.double()
    gram = wide @ wide.transpose(-1, -2)
    gram = gram + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    solved: Tensor = torch.linalg.solve(gram, wanted.double())
    return (wide.transpose(-1, -2) @ solved).to(wanted.dtype)
