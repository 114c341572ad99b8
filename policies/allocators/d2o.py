"""D2O: layers with evenly spread attention get more slots than layers that attend to few tokens.

Shapes: B batch, L layers, H_kv KV heads, G query heads per KV head, T prompt tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.allocators.rounding import largest_remainders
from kvbench.policies.checks import check_choices, layers_exist, whole_numbers
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State

EPS = 1e-6
LEAST_SHARE = 0.01  # smallest share of the prompt per layer in the released code
EVERYTHING = 2**31 - 1  # slots of a layer that is never evicted


def column_variance(sums: Tensor, occupied: Tensor) -> Tensor:
    """Unbiased variance over the stored tokens of column sums [B,H_kv,T,K], occupied [B,H_kv,T]: [B,H_kv*K].

    Source: D2O, eq. 4. One token has variance 0.
    """
    stored = occupied[..., None]
    count = stored.sum(2)
    mean = sums.masked_fill(~stored, 0.0).sum(2) / count.clamp(min=1)
    spread = (sums - mean[:, :, None]).masked_fill(~stored, 0.0).square().sum(2)
    return (spread / (count - 1).clamp(min=1)).flatten(1)


def proportions(log_weights: Sequence[float]) -> list[float]:
    """Softmax of any weights: several weights of +inf get equal shares, and so do weights that are all -inf."""
    top = max(log_weights)
    powers = [float(w == top) if math.isinf(top) else math.exp(w - top) for w in log_weights]
    whole = math.fsum(powers)
    return [power / whole for power in powers]


def fill(log_weights: Sequence[float], total: float, floor: float, cap: float) -> list[float]:
    """Water-filling: clip(exp(mu + w_l), floor, cap) with the one mu for which the targets sum to `total`.

    L * floor <= total <= L * cap. If the proportions miss the floor by more than they exceed the cap, mu has to fall,
    so every layer at or below the floor is final; otherwise every layer at or above the cap is final. The other layers
    share the rest again. Ends after at most L rounds.
    """
    targets = dict.fromkeys(range(len(log_weights)), 0.0)
    free = list(targets)
    while free:
        left = total - math.fsum(targets[layer] for layer in targets if layer not in free)
        shares = proportions([log_weights[layer] for layer in free])
        targets |= {layer: left * share for layer, share in zip(free, shares, strict=True)}
        above = math.fsum(max(0.0, targets[layer] - cap) for layer in free)
        below = math.fsum(max(0.0, floor - targets[layer]) for layer in free)
        if above >= below:
            bound = [layer for layer in free if targets[layer] >= cap]
        else:
            bound = [layer for layer in free if targets[layer] <= floor]
        if above == below:
            bound = free
        targets |= {layer: min(max(targets[layer], floor), cap) for layer in bound}
        free = [layer for layer in free if layer not in bound]
    return list(targets.values())


@dataclass(frozen=True)
class InverseVariance(StatisticAllocator):
    """Slots in proportion to exp(-F_l), F_l the variance over the prompt tokens of their received attention.

        b_l = e^(-F_l) / (sum_k e^(-F_k)) * B * L
        F_l = mean_h var_j c_(h,j), c_(h,j) = sum_q A_(h,q,j)

    norm: `layer_minmax` scales F to 0..1 over the layers, so that no layer gets more than e times another;
    `head_minmax` (released code) scales over the heads of each layer and averages; `per_token` is the population
    variance divided by T, between 0 and 1; `raw` is F itself, which gives nearly all slots to the layer of least
    variance. allocation: `softmax` as above; `reciprocal`, in proportion to 1 / F for any norm; `uniform`;
    `exponential` gives exp(-F_l) of the prompt, which has no fixed total: scaled to the budget, it equals `softmax`.
    variance: F of every query head, averaged (`heads`), or of the sums averaged over heads (`mean_map`). rounding:
    `exact` keeps every layer between its protected tokens and the prompt length, distributes the rest in proportion,
    and rounds by largest fractional parts. `official` truncates shares clipped to 0.01..1 of the prompt, which changes
    the total. skip_layers: layers (negative: from the end) that keep their whole prompt. With `exact` rounding their
    slots count in the total; with `official` they are extra, and these layers keep growing.
    Source: Wan et al. 2024, arXiv 2406.13035, eq. 4, 5 and table 4 (section 5.4); `layer_minmax` and `exact` are ours,
    because eq. 5 underflows on real variances and gives no whole numbers.
    """

    needs = Needs(statistics=("attention_sum",), query_heads=True)

    norm: Literal["layer_minmax", "head_minmax", "per_token", "raw"] = "layer_minmax"
    allocation: Literal["softmax", "reciprocal", "uniform", "exponential"] = "softmax"
    variance: Literal["heads", "mean_map"] = "heads"
    rounding: Literal["exact", "official"] = "exact"
    skip_layers: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_choices(self)
        whole_numbers("skip_layers", self.skip_layers)
        if self.norm == "head_minmax" and (self.variance == "mean_map" or self.allocation == "reciprocal"):
            raise ConfigError(
                "norm",
                "head_minmax",
                why="compares heads and cannot be combined with variance=mean_map or allocation=reciprocal",
            )

    def check_heads(self, heads: Sequence[int]) -> None:
        layers_exist("skip_layers", self.skip_layers, len(heads))

    def check_next_prompt(self, name: str) -> None:
        if self.variance == "mean_map":
            raise ValueError(
                f"{name} averages attention token by token over the heads of a layer (variance=mean_map), which after "
                "an eviction hold different tokens, so another prompt cannot share the layers' slots out: use "
                "variance=heads"
            )

    @property
    def exact(self) -> bool:
        return self.rounding == "exact"

    def measure(self, observation: Observation, state: State) -> Tensor:
        """[B,1] float32: F of this layer, without the normalisation over layers."""
        sums, occupied = state["attention_sum"], observation.occupied
        if self.variance == "mean_map":
            # Heads hold the same tokens in the same slots, because no token is evicted before the end of the prompt.
            sums, occupied = sums.mean((1, 3), keepdim=True), occupied[:, :1]
        variances = column_variance(sums, occupied)  # [B,H_q]
        if self.norm == "head_minmax":
            low, high = variances.amin(-1, keepdim=True), variances.amax(-1, keepdim=True)
            variances = (variances - low) / (high - low + EPS)
        if self.norm == "per_token":
            tokens = occupied.sum(-1).clamp(min=1).repeat_interleave(sums.shape[-1], dim=-1)  # [B,H_q]
            variances = variances * (tokens - 1) / tokens / tokens
        return variances.mean(-1, keepdim=True)

    def share(self, statistics: Sequence[Sequence[float]], total: int, layers: int, floor: int, cap: int) -> list[int]:
        assert len(statistics) == layers, "shares are computed after every layer is measured"
        weights = self.log_weights([variance for (variance,) in statistics])
        layers_exist("skip_layers", self.skip_layers, layers)
        skipped = {layer % layers for layer in self.skip_layers}
        if self.rounding == "official":
            return self._official(weights, skipped, total, floor, cap)
        rest = [layer for layer in range(layers) if layer not in skipped]
        left = total - len(skipped) * cap
        if left < len(rest) * floor:
            raise ConfigError(
                "skip_layers",
                tuple(self.skip_layers),
                why=f"hold {len(skipped) * cap} of the {total} slots of all layers, "
                f"which leaves too few for the others: use a larger budget or rounding=official",
            )
        targets = torch.tensor([fill([weights[layer] for layer in rest], left, floor, cap)], dtype=torch.float64)
        counts = largest_remainders(targets, torch.tensor([left]), torch.full_like(targets, cap, dtype=torch.long))
        given = dict(zip(rest, counts[0].tolist(), strict=True))
        return [given.get(layer, cap) for layer in range(layers)]

    def log_weights(self, variances: Sequence[float]) -> list[float]:
        """Logarithms of the layers' unnormalised shares; safe for zeros and infinities."""
        if self.allocation == "uniform":
            return [0.0] * len(variances)
        if self.allocation == "reciprocal":
            return [-math.log(v) if v > 0 else math.inf for v in variances]
        return [-x for x in (minmax(variances) if self.norm == "layer_minmax" else variances)]

    def _official(self, log_weights: Sequence[float], skipped: set[int], total: int, floor: int, cap: int) -> list[int]:
        """Truncated shares of the stored tokens, never below the floor."""
        if self.allocation == "exponential":
            alphas = [math.exp(w) for w in log_weights]
        else:
            alphas = [total / cap * share for share in proportions(log_weights)]
        counts = [max(floor, int(min(max(alpha, LEAST_SHARE), 1.0) * cap)) for alpha in alphas]
        return [EVERYTHING if layer in skipped else count for layer, count in enumerate(counts)]


def minmax(variances: Sequence[float]) -> list[float]:
    """(F - min F) / (max F - min F + eps), 0 to 1 over the layers; infinite values become 1, and the others then 0."""
    low, high = min(variances), max(variances)
    if math.isinf(high):
        return [0.0 if math.isinf(low) else float(math.isinf(v)) for v in variances]
    return [(v - low) / (high - low + EPS) for v in variances]
