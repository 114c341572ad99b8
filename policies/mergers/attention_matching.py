"""Attention matching: fit biases and values of kept tokens so that reference queries get the same output as before.

Shapes: B batch, H KV heads, G query heads per KV head, W queries of the window, R = G * W rows, T slots, n kept slots
(the maximum over heads), D head dim.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.references import attention_logits, visible, widen
from kvbench.kernels.selection import take
from kvbench.policies.checks import number, whole_number
from kvbench.policies.mergers.merger import Eviction, Merged, Merger, MergeState, OneEviction, in_order
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation

NEVER = 1e-12  # smallest weight of a slot, so that its bias is finite


@dataclass(frozen=True)
class AttentionMatching(Merger):
    """Fit a bias b of each kept token to match the attention mass and a new value to match the outputs; keys stay.

        b_i = log w_i, w = argmin_(w >= 0) sum_q (sum_(i in "kept") w_i m_(q,i) - 1)^2, m_(q,i) = e^(q k_i) / Z_q

    Z_q is the mass of all tokens, sum_j e^(q k_j). o_q is the attention output of reference query q over all tokens,
    and p_q its softmax over the kept tokens with bias:

        v = argmin_v sum_q ||sum_(i in "kept") p_(q,i) v_i - o_q||^2 + ridge * sum_i ||v_i - v_i^"old"||^2

    Reference queries are the newest `queries` of the prompt, in all query heads of a group. Tokens that are not visible
    to all of them do not change. The fit is computed when a prompt or a block of it is evicted; decoding evicts tokens
    without it. Later tokens have bias 0.

    queries: number of newest queries to match. steps: steps of accelerated projected gradients, from w = 1, for the
    non-negative least squares. ridge: weight of the distance to the old values; it determines the solution if there are
    fewer rows than tokens.
    Source: Zweiger et al. 2026, arXiv 2602.16284: the simplest variant, with given keys (the paper also searches for
    keys) and queries of the context (the paper also lets the model repeat the context); the ridge is ours.
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
        assert eviction.seen is not None, "several tokens are evicted at once only at the end of a prompt or a block"
        kept = in_order(eviction.kept, eviction.positions)
        asked = reference_rows(eviction.seen, self.queries)
        values = widen(eviction.values).masked_fill((eviction.positions < 0)[..., None], 0.0)
        own = take(values, kept.slots)
        free = eviction.positions.gather(-1, kept.slots) <= asked.oldest[:, None, None]
        free &= kept.present & eviction.evicted.any(-1, keepdim=True)
        index = kept.slots[:, :, None].expand(-1, -1, asked.logits.shape[2], -1)
        rows = asked.logits.gather(-1, index).masked_fill(~kept.present[:, :, None], -torch.inf)
        real = asked.real * (rows > -torch.inf).any(-1, keepdim=True)  # queries that see no kept token are ignored
        weights = mass_weights((rows - asked.log_masses).exp(), real, free, self.steps)
        fitted = (rows + weights.log()[:, :, None]).softmax(-1).nan_to_num(nan=0.0) * real
        wanted = (asked.logits.softmax(-1) @ values) * real - fitted @ own
        moved = own + ridge_solution(fitted * free[:, :, None], wanted, self.ridge)
        bias = weights.log().float()
        if eviction.seen.slots.bias is not None:
            bias += eviction.seen.slots.bias.gather(-1, kept.slots)
        # Padding entries write to an evicted slot, which is freed.
        return Merged(kept.slots, take(eviction.keys, kept.slots), moved.to(eviction.values.dtype), bias)

    def absorb_one(self, eviction: OneEviction, memory: MergeState) -> None:
        return None


class ReferenceRows(NamedTuple):
    """Reference queries: logits [B,H,R,T], -inf for slots that are not visible, and their log-sum-exp [B,H,R,1].

    real [B,H,R,1]: 1, or 0 for rows without a token, which have logits 0. oldest [B]: the position of the first query.
    """

    logits: Tensor
    log_masses: Tensor
    real: Tensor
    oldest: Tensor


def reference_rows(seen: Observation, queries: int) -> ReferenceRows:
    """The newest observed queries in all query heads of a group."""
    assert seen.window is not None, "the merger needs a window"
    asked, places = seen.window.queries[:, :, -queries:], seen.window.positions[:, -queries:]
    logits = attention_logits(asked, seen.keys, seen.params.scaling, seen.params.softcap, seen.slots.bias)
    sight = visible(places, seen.positions, seen.params.sliding_window)
    nothing = ~sight.any(-1, keepdim=True)  # of padding, and where a head evicted all that an old query saw
    logits = logits.masked_fill(~(sight | nothing)[:, :, None], -torch.inf).flatten(2, 3)
    real = (~nothing & (places >= 0)[:, None, :, None]).repeat(1, 1, asked.shape[1] // seen.keys.shape[1], 1)
    oldest = places.masked_fill(places < 0, torch.iinfo(places.dtype).max).amin(-1)
    return ReferenceRows(logits, logits.logsumexp(-1, keepdim=True), real.to(logits.dtype), oldest)


def mass_weights(masses: Tensor, real: Tensor, free: Tensor, steps: int) -> Tensor:
    """Weights w >= 0 [B,H,n], 1 where not `free`, such that weighted masses [B,H,R,n] of real rows sum to 1.

    argmin |masses w - 1|^2 by accelerated projected gradients (FISTA, Beck and Teboulle 2009) from 1; the step size is
    1 over the largest row sum of A^T A, which bounds its eigenvalues.
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
    """Minimise |rows x - wanted|^2 + ridge |x|^2 in float64: rows [B,H,R,n], wanted [B,H,R,D] -> x [B,H,n,D].

    Uses the dual form, because there are usually fewer rows than tokens: x = rows^T (rows rows^T + ridge I)^-1 wanted.
    """
    wide = rows.double()
    gram = wide @ wide.transpose(-1, -2)
    gram = gram + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    solved: Tensor = torch.linalg.solve(gram, wanted.double())
    return (wide.transpose(-1, -2) @ solved).to(wanted.dtype)
