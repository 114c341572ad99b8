"""OTT: KIVI's groups, with the tokens that would stretch them traced and kept exact.

Shapes: B batch, H KV heads, T new tokens, m groups of G tokens, n pool capacity, A auxiliary capacity, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.kernels.selection import take
from kvbench.policies.checks import check_choices, layers_exist, whole_number, whole_numbers
from kvbench.policies.draws import uniform_draws
from kvbench.policies.observation import Memory
from kvbench.policies.stores.code_attention import Outliers
from kvbench.policies.stores.coding import Grouped
from kvbench.policies.stores.kivi import KiviCodes
from kvbench.policies.stores.quantiser import NOT_FINITE

POOLS = "pool keys", "pool values", "pool slots", "frozen"


class Pools:
    """Traced tokens of one layer: exact keys and values [B,H,n+A,D] at slots [B,H,n+A] (-1: empty), the pool first.

    frozen [B,H]: the pools of a head do not change any more. memory: holds all of them, empty at first.
    """

    def __init__(self, ott: "Ott", memory: Memory, keys: Tensor, values: Tensor) -> None:
        self.ott, self.memory, self.fresh = ott, memory, not memory
        if self.fresh:
            size = (*keys.shape[:2], ott.most_traced)
            pools = (x.new_zeros(*size, x.shape[-1]) for x in (keys, values))
            slots = torch.full(size, -1, dtype=torch.int32, device=keys.device)
            memory |= zip(POOLS, (*pools, slots, torch.zeros_like(slots[..., 0], dtype=torch.bool)), strict=True)

    def trace(self, keys: Tensor, values: Tensor, first: int) -> list[Tensor]:
        """New tokens [B,H,m*G,D] compete group by group, oldest first; returns both with traced ones filled in.

        first: the slot of the first new token.
        """
        if not keys.is_meta and not bool(keys.isfinite().all() & values.isfinite().all()):
            raise ValueError(NOT_FINITE)  # a traced token would not be checked later
        slots = torch.arange(first, first + keys.shape[2], device=keys.device).expand(keys.shape[:3])
        scores, group = self.ott.scores(keys, slots), self.ott.group
        span = keys.shape[2] if self.ott.prefill_mode == "joint" and self.fresh else group
        traced, entries = self._compete(scores.unflatten(-1, (-1, span)))
        self._hold(entries, keys, values, slots)
        return [self._filled(x, traced.view(*keys.shape[:2], -1, group)) for x in (keys, values)]

    def _compete(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The new tokens, of groups of scores [B,H,m,span], that were admitted to the pool, bool of the same shape.

        Also the numbers [B,H,n+A] of the tokens in the pools: stored tokens first, then new ones; -1: empty.
        """
        held_slots, frozen, capacity = self.memory["pool slots"], self.memory["frozen"], self.ott.outliers
        stored = held_slots.shape[-1]
        numbers = torch.arange(stored, device=scores.device).masked_fill(held_slots < 0, -1)
        pool, spare = numbers.split([capacity, stored - capacity], dim=-1)
        held = self.ott.scores(self.memory["pool keys"][:, :, :capacity], held_slots[..., :capacity])
        held = held.masked_fill(pool < 0, torch.inf)
        best = scores.argsort(dim=-1, stable=True)[..., :capacity]
        lowest, span = scores.gather(-1, best), scores.shape[3]
        traced = torch.zeros_like(scores, dtype=torch.bool)
        for g in range(0 if scores.is_meta else scores.shape[2]):  # without data no token wins
            new = lowest[:, :, g]
            active = ~frozen
            both = torch.cat([held, new], dim=-1)
            tokens = torch.cat([pool, best[:, :, g] + g * span + stored], dim=-1)
            order = both.argsort(dim=-1, stable=True)  # pool tokens are first, so they win ties
            winners, losers = order[..., :capacity], order[..., capacity:]
            if self.ott.on_evict == "pool":
                defeated = (losers < capacity) & both.gather(-1, losers).isfinite()
                overflow = (spare >= 0).sum(-1) + defeated.sum(-1) > spare.shape[-1]
                frozen = frozen | overflow
                active = active & ~overflow
                spare = _appended(spare, tokens.gather(-1, losers), defeated & active[..., None])
            admitted = torch.zeros_like(both, dtype=torch.bool).scatter_(-1, winners, True)[..., capacity:]
            traced[:, :, g].scatter_(-1, best[:, :, g], admitted & active[..., None])
            pool = torch.where(active[..., None], tokens.gather(-1, winners), pool)
            held = torch.where(active[..., None], both.gather(-1, winners), held)
        self.memory["frozen"] = frozen
        return traced, torch.cat([pool.masked_fill(~held.isfinite(), -1), spare], dim=-1)

    def _hold(self, entries: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store the tokens with these numbers; keys, values and slots are those of the new tokens."""
        memory, held_slots = self.memory, self.memory["pool slots"]
        stored = held_slots.shape[-1]
        old, new = entries.clamp(0, stored - 1), (entries - stored).clamp(min=0)
        is_new = entries >= stored
        for name, x in (("pool keys", keys), ("pool values", values)):
            here = torch.where(is_new[..., None], take(x, new), take(memory[name], old))
            memory[name] = here.masked_fill_((entries < 0)[..., None], 0)
        places = torch.where(is_new, slots.gather(-1, new), held_slots.gather(-1, old))
        memory["pool slots"] = places.masked_fill_(entries < 0, -1).to(torch.int32)

    def _filled(self, tokens: Tensor, traced: Tensor) -> Tensor:
        """tokens [B,H,m*G,D] with traced ones [B,H,m,G] replaced by their group's mean, float32."""
        group = traced.shape[-1]
        x = widen(tokens).unflatten(2, (-1, group))
        if self.ott.fill == "mean":
            mean = x.mean(3, keepdim=True)
        else:
            inlier = ~traced[..., None] | traced.all(-1)[..., None, None]
            mean = (x * inlier).sum(3, keepdim=True) / inlier.sum(3, keepdim=True)
        return torch.where(traced[..., None], mean, x).flatten(2, 3)


def _appended(numbers: Tensor, more: Tensor, chosen: Tensor) -> Tensor:
    """numbers [B,H,A], of which the first are in use and the others -1, followed by the chosen ones of more [B,H,n]."""
    size = numbers.shape[-1]
    places = (numbers >= 0).sum(-1, keepdim=True) + chosen.cumsum(-1) - 1
    places = places.masked_fill(~chosen, size)
    return torch.nn.functional.pad(numbers, (0, 1)).scatter(-1, places, more)[..., :size]


@dataclass(frozen=True)
class Ott(KiviCodes):
    """KIVI's groups, flushed together every `group` tokens past a residual; tokens of small keys are kept out of them.

        s_j = sum_d |k_(j,d)|, "kept exactly: the" outliers "tokens of least" s

    At each flush the group's tokens compete with the pool of exact tokens per KV head; the smallest keys win, and the
    mean of the group replaces them before it is quantised. Defeated tokens move to the auxiliary pool; when that would
    overflow, the head's pools freeze.

    group: tokens that are quantised together. residual: newest tokens that are exact. outliers: size of the pool.
    auxiliary: size of the auxiliary pool. skip_layers: layers that trace nothing. norm: of the key, l1 or l2. trace:
    the smallest keys, the largest, or a random choice. fill: what replaces a traced token in its group, the mean of all
    tokens or of the others (`inlier_mean`). prefill_mode: the prompt competes group by group, or once (`joint`).
    on_evict: defeated tokens move to the auxiliary pool, or are discarded. pool_scope: every KV head has its own
    tokens, or all heads of a layer share them (scores summed). seed: of trace=random.
    Source: Su et al. 2025, arXiv 2505.10938, section 3.2 and appendix E.
    """

    kinds: ClassVar[Mapping[str, str]] = {"words": "codes"} | dict.fromkeys(POOLS, "outlier pool")
    slug_letters: ClassVar[Mapping[str, str]] = {
        "g": "group",
        "r": "residual",
        "n": "outliers",
        "skip": "skip_layers",
        "int": "bits",
    }

    group: int = 128
    residual: int = 32
    outliers: int = 3
    auxiliary: int = 32
    skip_layers: Sequence[int] = (0, 1)
    norm: Literal["l1", "l2"] = "l1"
    trace: Literal["smallest", "largest", "random"] = "smallest"
    fill: Literal["mean", "inlier_mean"] = "mean"
    prefill_mode: Literal["sequential", "joint"] = "sequential"
    on_evict: Literal["pool", "discard"] = "pool"
    pool_scope: Literal["head", "layer"] = "head"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_numbers("skip_layers", self.skip_layers, 0)
        object.__setattr__(self, "skip_layers", tuple(self.skip_layers))  # a YAML gives a list
        for name, least in (("group", 1), ("residual", 0), ("outliers", 0), ("auxiliary", 0), ("seed", 0)):
            whole_number(name, getattr(self, name), least)
        check_choices(self)

    def check_layers(self, layers: int) -> None:
        layers_exist("skip_layers", self.skip_layers, layers)

    def for_layer(self, index: int) -> "Ott":
        return replace(self, outliers=0) if index in self.skip_layers else self

    def scores(self, keys: Tensor, slots: Tensor) -> Tensor:
        """[B,H,T] float32 of keys [B,H,T,D] at slots [B,H,T]; lower = more of an outlier."""
        if self.trace == "random":
            scores = uniform_draws(self.seed, 0, slots)
        else:
            scores = torch.linalg.vector_norm(widen(keys), ord=1 if self.norm == "l1" else 2, dim=-1)
            scores = -scores if self.trace == "largest" else scores
        return scores.sum(1, keepdim=True).expand_as(scores) if self.pool_scope == "layer" else scores

    def check_policy(self, name: str, evicts_in_decode: bool, per_head: bool) -> None:
        super().check_policy(name, evicts_in_decode, per_head)
        if self.pool_scope == "layer":
            raise ValueError(
                f"{name} keeps other tokens in every KV head, so heads cannot share traced ones: use pool_scope=head"
            )

    def due(self, side: int, exact: int) -> int:
        return max(exact - self.residual, 0) // self.group * self.group

    @property
    def most_exact(self) -> int:
        return self.residual + self.group

    @property
    def most_traced(self) -> int:  # type: ignore[override]
        return self.outliers and self.outliers + (self.auxiliary if self.on_evict == "pool" else 0)

    def flush(self, held: Grouped, prompt: bool) -> None:
        count = self.due(0, held.exact_of(0))
        if count == 0:
            return
        keys, values = held.oldest(0, count), held.oldest(1, count)
        tokens = [keys, values]
        if self.outliers:
            tokens = Pools(self, held.notes, keys, values).trace(keys, values, held.in_codes[0])
        for side, x in enumerate(tokens):
            held.hold(side, count, self.coded(x, side, keys.dtype))

    def traced(self, notes: Memory) -> Outliers | None:
        return Outliers(*(notes[name] for name in POOLS[:3])) if notes else None
