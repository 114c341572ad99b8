"""D2O: an evicted token is averaged into the most similar kept token, if it is similar enough.

Shapes: B batch, H KV heads, T slots, E evicted and C kept tokens (maxima over heads), D head dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors import ConfigError
from kvbench.kernels.devices import numbers_at_once
from kvbench.kernels.references import widen
from kvbench.kernels.selection import take
from kvbench.policies.checks import check_choices, number
from kvbench.policies.mergers.merger import Eviction, Merged, Merger, MergeState, OneEviction, Slots, Vectors
from kvbench.policies.needs import Needs
from kvbench.policies.stores.slots import padded

SIMILARITIES_AT_ONCE = 2**19  # 2 MiB of float32: similarities are computed for some evicted tokens at a time
GROUP = 64  # kept tokens per group of a maximum
NORM_FLOOR = 1e-6


class Exchange(NamedTuple):
    """Keys or values of all slots [B,H,T,D], of kept ones [B,H,C,D], and the evicted slots [B,H,E]."""

    stored: Tensor
    own: Tensor
    evicted: Tensor

    def gone(self, here: slice) -> Tensor:
        """Those of some evicted slots, [B,H,e,D]."""
        return take(self.stored, self.evicted[..., here])


class Match(NamedTuple):
    """The nearest kept token of each evicted token: its similarity and its index among the kept, [B,H,E] each."""

    similarity: Tensor
    nearest: Tensor


def margin(dtype: torch.dtype) -> float:
    """Largest difference of cosines in `dtype` that rounding can cause; closer cosines count as equal.

    Equal tokens have equal values in the first layer, but products of different shapes (a larger batch, another slot in
    the cache) may round the last bits differently. Rounding must not determine the nearest token.
    """
    return 64 * torch.finfo(dtype).eps


def unit(vectors: Tensor) -> Tensor:
    """Vectors [...,D] scaled to length 1, or shorter if they are almost 0."""
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / length.clamp_(min=NORM_FLOOR)


def pieces(tokens: int, numbers: int, like: Tensor) -> list[slice]:
    """`tokens` in pieces of a bounded size, each token of which takes some numbers."""
    size = max(1, numbers_at_once(like, SIMILARITIES_AT_ONCE) // numbers)
    return [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]


def match(judged: Exchange, present: Tensor | None) -> Match:
    """Nearest kept vector among `present` [B,H,C] for each evicted one, by cosine similarity (eq. 9).

    present None: all. Ties (`margin`) go to the older kept token. Padding entries repeat the head's first token.
    """
    own = unit(widen(judged.own))
    kept = own.shape[2]
    places = torch.arange(-(-kept // GROUP) * GROUP, device=own.device)
    if present is None:
        places = places.masked_fill_(places >= kept, 0).expand(*own.shape[:2], -1)
    else:
        places = torch.where(F.pad(present, (0, len(places) - kept)), places, 0)
    whole = present is None and places.shape[-1] == kept
    candidates = (own if whole else take(own, places)).transpose(-1, -2).contiguous()  # [B,H,D,C]
    some = pieces(judged.evicted.shape[-1], candidates[:, :, 0].numel(), own)
    parts = [_nearest(unit(widen(judged.gone(here))) @ candidates) for here in some]
    similarities, indices = (x[0] if len(x) == 1 else torch.cat(x, -1) for x in zip(*parts, strict=True))
    return Match(similarities, places.gather(-1, indices))


def _nearest(similarities: Tensor) -> Match:
    """The largest of each row [...,C] and the first index within `margin`, found in groups for speed."""
    groups = similarities.unflatten(-1, (-1, GROUP))
    highs = groups.amax(-1)
    best = highs.amax(-1, keepdim=True)
    least = best - margin(best.dtype)
    group = (highs >= least).to(torch.int8).argmax(-1, keepdim=True)
    members = groups.gather(-2, group[..., None].expand(*group.shape, GROUP)).squeeze(-2)
    inside = (members >= least).to(torch.int8).argmax(-1)
    return Match(best.squeeze(-1), torch.add(inside, group.squeeze(-1), alpha=GROUP))


def _along(vectors: Tensor, gone: Tensor) -> Tensor:
    """Products of one token per KV head, [B,H,1,D] float32, with vectors [B,H,T,D] at length 1: [B,H,T]."""
    wide = widen(vectors)
    lengths = torch.linalg.vector_norm(wide, dim=-1).clamp_(min=NORM_FLOOR)
    products = torch.bmm(wide.flatten(0, 1), gone.flatten(0, 1).transpose(1, 2))
    return products.view(lengths.shape).div_(lengths)


def match_one(vectors: Vectors, eviction: OneEviction) -> tuple[Tensor, Tensor]:
    """`match` for one evicted token per KV head: its similarity and nearest slot, [B,H,1] each."""
    gone = widen(vectors.at(eviction.victims))
    products = padded(vectors.each(_along, gone), fill=-torch.inf)
    if not eviction.packed:
        products.masked_fill_(eviction.positions < 0, -torch.inf)
    products.scatter_(-1, eviction.victims, -torch.inf)
    best, length = products.amax(-1, keepdim=True), torch.linalg.vector_norm(gone, dim=-1).clamp_(min=NORM_FLOOR)
    least = torch.sub(best, length, alpha=margin(best.dtype))
    older = eviction.positions.masked_fill(products < least, torch.iinfo(eviction.positions.dtype).max)
    return best / length, older.argmin(-1, keepdim=True)


def _below(similarity: Tensor, threshold: Tensor) -> Tensor:
    """Whether a similarity is below the threshold by more than rounding; never below NaN (no threshold yet)."""
    return similarity < threshold - margin(similarity.dtype)


def sums_at(
    shape: torch.Size, found: Tensor, mass: Tensor, gain: Tensor, pairs: Sequence[Exchange] = ()
) -> list[Tensor]:
    """Sums at the places `found` [B,H,E] of the masses, [B,H,C,1], and of each pair's vectors times gain, [B,H,C,D].

    shape [B,H,C]. The order of additions is deterministic.
    """
    widths = [1, *(pair.own.shape[3] for pair in pairs)]
    total = mass.new_zeros(*shape, sum(widths))
    for here in pieces(found.shape[-1], shape[0] * shape[1] * sum(widths), mass):
        places, factor = found[..., here], gain[..., here, None]
        new = torch.cat([mass[..., here, None], *(factor * pair.gone(here) for pair in pairs)], -1)
        heads = torch.arange(0, shape.numel(), shape[2], device=new.device).view(*shape[:2], 1)
        rows = (heads + places).flatten()
        total.flatten(0, 2).index_put_((rows,), new.flatten(0, 2), accumulate=True)  # sorts first, unlike scatter_add_
    return list(total.split(widths, -1))


@dataclass(frozen=True)
class ThresholdedMerge(Merger):
    """Average each evicted token into its nearest kept token, if their similarity reaches a running threshold.

        u_i = max_c cos(k_i, k_c), "merged where" u_i >= tau
        k_c <- (e * k_c + sum_i e^(u_i) k_i) / (e + sum_i e^(u_i)), v_c "likewise"
        tau <- beta * u + (1 - beta) * tau

    If similarities are equal up to rounding, the older kept token is the nearest, and u_i reaches tau.
    The threshold tau starts as the mean of the nearest similarities at a sequence's first eviction; afterwards u is
    (the mean of) the new ones.

    similarity: cosine of `keys` as cached (rotated), of `values`, or `separate`: keys and values are matched, compared
    with a threshold and merged separately. beta: the weight of new similarities in the threshold. ema: false merges
    every evicted token. tau_scope: one threshold per KV head, or per `layer`: then the mean similarity of the r-th
    evicted tokens of all heads is compared with it, as in the released code. merge: `weighted` by `weight`, or
    `average` with equal weights. weight: `exp`, in proportion to e for the kept token and exp(u_i) for the evicted
    ones, which sums to one; `sim_mean` (released code) is (k + sum u_i k_i) / (1 + n); `printed` is eq. 12 to the
    letter, where the weights of several tokens exceed one.
    Source: Wan et al. 2024, arXiv 2406.13035, eq. 9-12.
    """

    similarity: Literal["keys", "values", "separate"] = "keys"
    beta: float = 0.7
    ema: bool = True
    tau_scope: Literal["kv_head", "layer"] = "kv_head"
    merge: Literal["weighted", "average"] = "weighted"
    weight: Literal["exp", "sim_mean", "printed"] = "exp"

    def __post_init__(self) -> None:
        check_choices(self)
        number("beta", self.beta, 0, 1)
        if self.merge == "average" and self.weight != "exp":
            raise ConfigError(
                "merge",
                "average",
                why=f"gives every token the same weight and cannot be combined with weight={self.weight}",
            )

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs(memory=self.ema)

    def absorb(self, eviction: Eviction, memory: MergeState) -> Merged | None:
        (kept, evicted), whole = eviction.in_order, eviction.even
        if not evicted.slots.shape[-1] or not kept.slots.shape[-1]:
            return None
        keys, values = (Exchange(x, take(x, kept.slots), evicted.slots) for x in (eviction.keys, eviction.values))
        if self.similarity == "separate":
            (new_keys,) = self._merged(keys, [keys], evicted, kept, memory, "tau", whole)
            (new_values,) = self._merged(values, [values], evicted, kept, memory, "tau_values", whole)
        else:
            judged = keys if self.similarity == "keys" else values
            new_keys, new_values = self._merged(judged, [keys, values], evicted, kept, memory, "tau", whole)
        if eviction.sizes is not None or bool(kept.present.all()):
            return Merged(kept.slots, new_keys, new_values, in_order=eviction.sizes is not None)
        # Padding entries repeat the head's first token.
        entries = torch.arange(kept.slots.shape[-1], device=kept.slots.device).where(kept.present, 0)
        return Merged(kept.slots.gather(-1, entries), take(new_keys, entries), take(new_values, entries))

    def absorb_one(self, eviction: OneEviction, memory: MergeState) -> Merged | None:
        if self.similarity == "separate":
            return super().absorb_one(eviction, memory)
        keys, values = eviction.keys, eviction.values
        similarity, nearest = match_one(keys if self.similarity == "keys" else values, eviction)
        gain, mass = self._weights(similarity)
        share = mass / (mass + self._base)  # weight of the evicted token in the mean
        refused = self._refuses_one(similarity, eviction.going, memory)
        share = (share if refused is None else share.masked_fill(refused, 0.0))[..., None]
        places, new = torch.cat([nearest, eviction.victims], dim=-1), list[Tensor]()
        for vectors in (keys, values):
            held = vectors.at(places)
            own, gone = widen(held).split(1, dim=2)
            # If the weight is not the mass, the mass is 1 and the token is scaled.
            gone = gone if gain is mass else gone * gain[..., None]
            new.append(torch.lerp(own, gone, share).to(held.dtype))
        return Merged(nearest, new[0], new[1])

    def _merged(
        self, judged: Exchange, pairs: list[Exchange], evicted: Slots, kept: Slots, memory: MergeState, tau: str,
        whole: bool,
    ) -> list[Tensor]:  # fmt: skip
        """New contents of kept slots for each pair, matched by `judged` and accepted by the threshold of that name."""
        found = match(judged, None if whole else kept.present)
        accepted = evicted.present if whole else evicted.present & kept.present.any(-1, keepdim=True)
        if self.ema:
            accepted = accepted & self._passes(found.similarity, accepted, memory, tau)
        gain, mass = (x.masked_fill(~accepted, 0.0) for x in self._weights(found.similarity))
        if self.merge == "weighted" and self.weight == "printed":
            (masses,) = sums_at(kept.slots.shape, found.nearest, mass, gain)
            gain = masses[..., 0].gather(2, found.nearest).masked_fill(~accepted, 0.0)
        masses, *sums_of_pairs = sums_at(kept.slots.shape, found.nearest, mass, gain, pairs)
        merged = []
        for pair, sums in zip(pairs, sums_of_pairs, strict=True):
            mixed = (self._base * widen(pair.own) + sums) / (self._base + masses)
            merged.append(torch.where(masses > 0, mixed.to(pair.own.dtype), pair.own))
        return merged

    def _passes(self, similarity: Tensor, present: Tensor, memory: MergeState, name: str) -> Tensor:
        """Mask of the evicted tokens [B,H,E] that reach the threshold, bool; updates the threshold (eq. 10)."""
        if self.tau_scope == "layer":
            heads = present.sum(1, keepdim=True)
            similarity = similarity.masked_fill(~present, 0.0).sum(1, keepdim=True) / heads.clamp(min=1)
            present = heads > 0
        old = memory.get(name)
        if old is None:
            old = similarity.new_full(similarity.shape[:-1], torch.nan)
        if similarity.shape[-1] == 1:
            # A single token reaches the new threshold if and only if it reaches the old one, independent of rounding.
            memory[name] = torch.where(present[..., 0], self._moved(old, similarity[..., 0]), old)
            return _below(similarity, old[..., None]).logical_not_()
        count = present.sum(-1)
        total = similarity.masked_fill(~present, 0.0).double().sum(-1)  # exact for equal similarities
        new = self._moved(old, (total / count.clamp(min=1)).to(similarity.dtype))
        memory[name] = torch.where(count > 0, new, old)
        judge = torch.where((count == 1) & ~old.isnan(), old, new)
        return _below(similarity, judge[..., None]).logical_not_()

    def _refuses_one(self, similarity: Tensor, going: Tensor | None, memory: MergeState) -> Tensor | None:
        """Mask of single tokens, in the sequences `going` (None: all), that are not merged; None: all are merged."""
        if not self.ema:
            return None if going is None else ~going
        tau = memory.get("tau")
        if tau is None or going is not None or self.tau_scope == "layer":
            present = torch.ones_like(similarity, dtype=torch.bool) if going is None else going.expand_as(similarity)
            return ~(self._passes(similarity, present, memory, "tau") & present)
        memory["tau"] = self._moved(tau, similarity[..., 0])
        return _below(similarity, tau[..., None])

    def _moved(self, tau: Tensor, similarity: Tensor) -> Tensor:
        """The threshold after one more similarity (tau NaN: the first)."""
        moved = torch.lerp(tau, similarity, self.beta)
        return torch.where(moved.isnan(), similarity, moved)

    @property
    def _base(self) -> float:
        """The kept token's contribution to the denominator."""
        return 1.0 if self.merge == "average" or self.weight == "sim_mean" else math.e

    def _weights(self, similarity: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of an evicted token and its contribution to the denominator: [B,H,E] each."""
        if self.merge == "average":
            alike = torch.ones_like(similarity)
            return alike, alike
        if self.weight == "sim_mean":
            return similarity, torch.ones_like(similarity)
        mass = similarity.exp()
        return mass, mass
