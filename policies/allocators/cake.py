"""CAKE's preference-prioritised allocation: layers with dispersed attention that shifts over time get more slots.

Shapes: B batch, H_kv KV heads, G query heads per KV head, W queries of the window, T tokens, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.allocators.webster import webster
from kvbench.policies.checks import check_choices
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.windows import StatsDtype, window_entropy, window_variance


@dataclass(frozen=True)
class P2A(StatisticAllocator):
    """Slots in proportion to a layer's preference P, the product of the dispersion and the shift of its attention.

        P_l = H_l^(1 / tau1) * V_l^(1 / tau2), b_l = w + P_l / (sum_k P_k) * (B - w) * L
        H_l = -sum_(h,q,j) A_(h,q,j) log A_(h,q,j), V_l = sum_(h,j) var_q A_(h,q,j)

    H: entropy, V: variance over the w newest queries, of the attention they pay to the tokens before the window. Every
    layer's share includes the window; for a prompt of T tokens, the rest is at most T - w.

    tau1: temperature of H; inf ignores H. tau2: temperature of V; inf ignores V. window: w, the number of observing
    queries; null uses the scorer's window. rounding: `webster` distributes exactly the total, and a layer's share never
    grows when further layers are measured; `official` truncates as the released code does, which loses slots of layers
    at their cap. cascading: evict measured layers immediately, so that peak memory is the whole budget plus one layer's
    prompt; with `official` rounding, a share that would grow later keeps its smaller value. official_gate: prompts that
    exceed the budget by at most one window are evicted only at the first decoding step. stats_dtype: `model` first
    rounds the attention to the model's dtype.
    Source: Qin et al. 2025, arXiv 2503.12491, eq. 4-9 and algorithm 1; adding w to each share follows its code.
    """

    tau1: float = 1.0
    tau2: float = 1.0
    window: int | None = field(default=None, metadata={"inherits": True})
    rounding: Literal["webster", "official"] = "webster"
    cascading: bool = True
    official_gate: bool = False
    stats_dtype: StatsDtype = "float32"

    def __post_init__(self) -> None:
        for name in ("tau1", "tau2"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a temperature above 0, got {getattr(self, name)}")
        if self.window is not None and self.window < 2:
            raise ConfigError("window", self.window, "at least 2 queries (a variance is taken over them)")
        check_choices(self)

    @property
    def exact(self) -> bool:
        return self.rounding == "webster"

    @property
    def cascades(self) -> bool:
        return self.cascading

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window or 0)

    def check_policy(self, name: str, queries: int) -> None:
        if self.window is None and queries < 2:
            raise ValueError(
                f"the allocator of {name} needs queries that observe, and its scorer has no window of them: give the "
                "allocator one, such as allocator.window=32"
            )

    def leaves_whole(self, length: int, total: int, layers: int, floor: int) -> bool:
        beyond = floor if self.official_gate else 0
        return (length - beyond) * layers <= total

    def measure(self, observation: Observation, state: State) -> Tensor:
        """[B,2]: H and V of this layer."""
        assert observation.window is not None, "checked when the policy is built"
        window = self.window or observation.window.queries.shape[2]
        return observation.once((self, window), lambda: self._measured(observation, window))

    def _measured(self, observation: Observation, window: int) -> Tensor:
        entropy = window_entropy(observation, window, self.stats_dtype)  # [B,H_kv,G,T]
        spread = window_variance(observation, window, self.stats_dtype)
        candidates = (observation.occupied & ~observation.newest(window))[:, :, None]  # [B,H_kv,1,T]
        return torch.stack([(x * candidates).sum((1, 2, 3)).to(entropy.dtype) for x in (entropy, spread)], dim=-1)

    def share(self, statistics: Sequence[Sequence[float]], total: int, layers: int, floor: int, cap: int) -> list[int]:
        slots, room = total - floor * layers, cap - floor
        preference = self.preference(statistics)
        shares: list[int] = []
        nested = self.rounding == "webster" and all(map(isfinite, preference))
        first = len(preference) if nested or not self.cascading else 1
        for seen in range(first, len(preference) + 1):  # one layer at a time: no share exceeds the share before
            caps = [*shares, *[room] * (seen - len(shares))]
            so_far = comparable(preference[:seen])
            if self.rounding == "webster":
                shares = webster(so_far, slots, caps)
            else:
                shares = [min(pair) for pair in zip(official(so_far, slots, room), caps, strict=True)]
        return [floor + share for share in shares]

    def preference(self, statistics: Sequence[Sequence[float]]) -> list[float]:
        """P of each layer from its (H, V), eq. 6."""
        return list(_preference(tuple(map(tuple, statistics)), self.tau1, self.tau2))


@lru_cache(maxsize=1)  # all budgets of a prompt have the same statistics
def _preference(statistics: tuple[tuple[float, ...], ...], tau1: float, tau2: float) -> tuple[float, ...]:
    entropy, spread = torch.tensor(statistics, dtype=torch.float64).clamp(min=0).unbind(-1)
    return tuple((entropy ** (1 / tau1) * spread ** (1 / tau2)).tolist())


def comparable(preference: Sequence[float]) -> list[float]:
    """The preferences, or equal preferences if any is not finite or all are 0."""
    if all(map(isfinite, preference)) and any(preference):
        return list(preference)
    return [1.0] * len(preference)


def official(preference: Sequence[float], total: int, cap: int) -> list[int]:
    """Shares of the total with the released code's rounding: truncate, clip, then distribute the lost slots evenly.

    Slots lost to clipping, then slots lost to truncation, go to the layers below `cap`, a remainder to the lowest
    layers. A layer may therefore exceed its cap; clipping it loses slots.
    Source: the code of CAKE (antgroup/cakekv, cake/utils.py).
    """
    whole = sum(preference)
    truncated = [int(p / whole * total) for p in preference]
    shares = [min(share, cap) for share in truncated]
    for lost in (sum(truncated) - sum(shares), total - sum(truncated)):
        below = [layer for layer, share in enumerate(shares) if share < cap]
        for rank, layer in enumerate(below):
            shares[layer] += lost // len(below) + (rank < lost % len(below))
    return shares
