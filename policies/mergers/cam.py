"""CaM: the value of an evicted token is added to those of the following tokens, with a probability.

Shapes: B batch, H KV heads, T slots, n stored tokens (the maximum over heads), D head dim.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.kernels.selection import take
from kvbench.policies.checks import whole_number
from kvbench.policies.draws import combined_seed, uniform_draws
from kvbench.policies.mergers.merger import Eviction, Merged, Merger, MergeState, OneEviction, Slots, in_order
from kvbench.policies.needs import Needs

AT_ONCE = 64  # tokens per triangular system


@dataclass(frozen=True)
class CaM(Merger):
    """Add v_j / m to the values of the next m stored tokens with probability a_j / mean(a of these m), at most 1.

        v_i <- v_i + v_j / m, i in "the next" m "tokens, with probability" min(1, a_j / mean_i(a_i))

    a is the accumulated attention (mean over the group); keys do not change. m is at most the number of tokens stored
    after the newest evicted token (the recent window). A prompt's tokens are evicted one by one, oldest first, so a
    value may be passed on several times.

    m: number of tokens that share the value. seed: seed of the draws, one per KV head and token, independent of the
    batch; every example of a run has its own (`for_example`).
    Source: Zhang et al. 2024, "CaM: Cache Merging for Memory-efficient LLMs Inference"; m = 32 and the mean in the
    denominator follow its released code, whose versions differ; the version used in the paper is unknown.
    """

    needs = Needs(layer=True, statistics=("attention_sum",))

    m: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("m", self.m, 1)
        whole_number("seed", self.seed, 0)

    def for_example(self, run_seed: int, example: int) -> Self:
        return replace(self, seed=combined_seed(self.seed, run_seed, example))

    def absorb(self, eviction: Eviction, memory: MergeState) -> Merged | None:
        stored = in_order(eviction.kept | eviction.evicted, eviction.positions)
        evicted = eviction.evicted.gather(-1, stored.slots) & stored.present
        reach = self._reach(evicted, stored.present)
        handed = self._handed(eviction, stored, evicted, reach)
        changing = handed.any(1).any(0).nonzero()
        if not len(changing):
            return None
        first, last = int(changing[0]), int(changing[-1]) + int(reach.max())
        here = slice(first, last + 1)
        slots, present = stored.slots[..., here], stored.present[..., here]
        old = take(eviction.values, slots)
        new = hand_on(widen(old), handed[..., here], reach)
        receives = follow(handed.double(), reach)[..., here] > 0
        values = torch.where((receives & present)[..., None], new.to(old.dtype), old)
        # Padding entries refer to the oldest token of the head, which receives no value.
        oldest = stored.slots[..., :1]
        slots = torch.where(present, slots, oldest)
        values = torch.where(present[..., None], values, take(eviction.values, oldest))
        return Merged(slots, take(eviction.keys, slots), values)

    def absorb_one(self, eviction: OneEviction, memory: MergeState) -> Merged:
        positions, victims = eviction.positions, eviction.victims
        late = torch.iinfo(positions.dtype).max
        place = positions.gather(-1, victims)
        later = positions.masked_fill(positions <= place, late).topk(min(self.m, positions.shape[-1]), largest=False)
        present = later.values < late
        reach = present.sum(-1, keepdim=True)
        drawn = eviction.state["attention_sum"].mean(-1)
        ahead = (drawn.gather(-1, later.indices) * present).sum(-1, keepdim=True) / reach
        probability = (drawn.gather(-1, victims) / ahead).nan_to_num(nan=0.0, posinf=1.0)
        handed = present & (uniform_draws(self.seed, eviction.layer, place) < probability)
        if eviction.going is not None:
            handed &= eviction.going
        slots = torch.where(handed, later.indices, victims)  # otherwise the evicted slot, unchanged
        old = eviction.values.at(slots)
        share = widen(eviction.values.at(victims)) / reach[..., None]
        values = torch.where(handed[..., None], (widen(old) + share).to(old.dtype), old)
        return Merged(slots, eviction.keys.at(slots), values)

    def _reach(self, evicted: Tensor, present: Tensor) -> Tensor:
        """Number of tokens that receive a value, [B,H]: m, or fewer if fewer follow the newest evicted token."""
        gone_later = evicted.flip(-1).cumsum(-1).flip(-1)  # evicted tokens from here on
        return (present & (gone_later == 0)).sum(-1).clamp(max=self.m)

    def _handed(self, eviction: Eviction, stored: Slots, evicted: Tensor, reach: Tensor) -> Tensor:
        """Mask of the stored tokens, in order, that pass their value on: bool [B,H,n]."""
        drawn = eviction.state["attention_sum"].mean(-1).gather(-1, stored.slots).double()
        drawn = drawn.masked_fill(~stored.present, 0.0)
        ahead = follow(drawn.flip(-1), reach).flip(-1) / reach[..., None]
        probability = (drawn / ahead).nan_to_num(nan=0.0, posinf=1.0)
        draws = uniform_draws(self.seed, eviction.layer, eviction.positions).gather(-1, stored.slots)
        return evicted & (draws < probability) & (reach[..., None] > 0)


def follow(x: Tensor, reach: Tensor) -> Tensor:
    """The sum of the `reach` [B,H] entries before each of x [B,H,n] (fewer at the start)."""
    sums = torch.nn.functional.pad(x.cumsum(-1), (1, 0))  # [B,H,n+1], sums[j] = x[0] + ... + x[j-1]
    places = torch.arange(x.shape[-1], device=x.device)
    return sums[..., :-1] - sums.gather(-1, (places - reach[..., None]).clamp(min=0))


def hand_on(values: Tensor, handed: Tensor, reach: Tensor) -> Tensor:
    """v'_j = v_j + sum of v'_i / reach over the handed tokens i among the `reach` before j, oldest first: [B,H,n,D].

    values [B,H,n,D], handed bool [B,H,n], reach [B,H]. A banded triangular system, solved AT_ONCE tokens at a time.
    """
    out = values.clone()
    weights = handed / reach.clamp(min=1)[..., None].to(values.dtype)
    band = int(reach.max())
    for start in range(0, values.shape[2], AT_ONCE):
        end, before = min(start + AT_ONCE, values.shape[2]), max(0, start - band)
        receivers, givers = (torch.arange(a, end, device=values.device) for a in (start, before))
        distance = receivers[:, None] - givers
        near = (distance >= 1) & (distance <= reach[..., None, None])  # [B,H,receivers,givers]
        matrix = torch.where(near, weights[..., None, before:end], 0.0)
        old = start - before
        known = out[:, :, start:end] + matrix[..., :old] @ out[:, :, before:start]
        system = torch.eye(end - start, dtype=values.dtype, device=values.device) - matrix[..., old:]
        out[:, :, start:end] = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    return out
