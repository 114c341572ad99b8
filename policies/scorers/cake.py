"""CAKE: keep tokens with a large mean or variance of the attention from the observation window.

Shapes: B batch, H_kv KV heads, G query heads per KV head, T slots.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.references import widen
from kvbench.policies.checks import check_choices, number
from kvbench.policies.constants import on_device
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.pooling import by_position, check_kernel, smooth, smooth_along
from kvbench.policies.scorers.scorer import AttentionScorer, group_mean
from kvbench.policies.windows import StatsDtype, window_mean, window_variance

SUMS, ORDER = "attention_sum", "slot_order"


@dataclass(frozen=True)
class Cake(AttentionScorer):
    """Keep the keys with a large mean + gamma * variance of the attention from the newest `window` queries.

        I_(h,j) = mean_q A_(h,q,j) + gamma * var_q A_(h,q,j), q in "window"
        s_j = 1 / kernel sum_(|i - j| <= floor(kernel / 2)) 1 / G sum_(h in "group") I_(h,i)

    The indicator I of each query head (unbiased variance over the window) is averaged over the group and over
    neighbouring candidates; the window itself is always kept and its indicator is not pooled. While decoding, the
    newest query's attention replaces the indicator and is pooled in the same way.

    window: number of newest queries that score. gamma: weight of the variance. kernel: number of averaged neighbours.
    indicator: `mean_var`; for the paper's ablation also `mean`, `var` and their `product`. decode_rule: `accumulate`
    sums the attention of all decoded queries instead of using only the newest. stats_dtype: `model` first rounds the
    attention to the model's dtype. slot_order: `score` pools over slots in the order of their last scores, as in the
    released code, instead of by position.
    Source: Qin et al. 2025, arXiv 2503.12491, eq. 11-12; the decoding rule follows its code.
    """

    window: int = 32
    gamma: float = 200.0
    kernel: int = 5
    indicator: Literal["mean_var", "mean", "var", "product"] = "mean_var"
    decode_rule: Literal["current_attention", "accumulate"] = "current_attention"
    stats_dtype: StatsDtype = "float32"
    slot_order: Literal["position", "score"] = "position"

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ConfigError("window", self.window, "at least 2 queries (a variance is taken over them)")
        number("gamma", self.gamma, 0)
        if str(self.decode_rule) == "none":  # the value in CAKE's configuration
            raise ConfigError(
                "decode_rule", "none", why="is not supported: use decode=grow to keep all generated tokens"
            )
        check_choices(self)
        check_kernel(self.kernel)

    @property
    def needs(self) -> Needs:
        ordered = self.slot_order == "score"
        statistics = *(SUMS,) * (self.decode_rule == "accumulate"), *(ORDER,) * ordered
        return Needs(
            window=self.window,
            window_decoding=0,
            statistics=statistics,
            newest_row=True,
            never_negative=True,
            kv_heads_only=ordered,
        )

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.window)

    def observe(self, observation: Observation, state: State) -> None:
        if self.decode_rule == "accumulate" and observation.phase == "decode":
            drawn = observation.window_attention(1).squeeze(-2).transpose(-1, -2)  # [B,H_kv,T,G]
            sums = state[SUMS]
            sums += drawn if sums.shape[-1] == drawn.shape[-1] else drawn.mean(-1, keepdim=True)
        if self.slot_order == "score":
            scores = self._in_read_order(group_mean(self.raw(observation, state)), observation, state)
            budgets = on_device(observation.sequences.budgets, observation.seen.device)[:, None, None]
            evicts = observation.occupied.sum(-1, keepdim=True) > budgets
            ranked = (evicts & self._candidates(observation))[..., None]
            state[ORDER].copy_(torch.where(ranked, scores[..., None], state[ORDER]))

    def score(self, observation: Observation, state: State) -> Tensor:
        if self.slot_order == "score" and observation.phase == "decode":
            return state[ORDER][..., 0]
        return observation.once(self, lambda: self.finish(group_mean(self.raw(observation, state)), observation))

    def raw(self, observation: Observation, state: State) -> Tensor:
        """The indicator of each query head, [B,H_kv,G,T] (G = 1 if the sums are already averaged over the group)."""
        if observation.phase == "decode":
            if self.decode_rule == "accumulate":
                return state[SUMS].transpose(-1, -2)
            return observation.window_attention(1).squeeze(-2)
        window = observation, self.window, self.stats_dtype
        if self.indicator == "mean":
            return widen(window_mean(*window))
        spread = window_variance(*window)
        if self.indicator == "var":
            return widen(spread)
        mean = window_mean(*window)
        return widen(mean * spread if self.indicator == "product" else mean + self.gamma * spread)

    def finish(self, raw: Tensor, observation: Observation) -> Tensor:
        return smooth(raw, observation, self.window, self.kernel, "avg")

    def _in_read_order(self, raw: Tensor, observation: Observation, state: State) -> Tensor:
        """[B,H_kv,T] pooled over neighbours: by position in a prompt, afterwards in the order of the last scores."""
        if observation.phase != "decode":
            return self.finish(raw, observation)
        order = by_position(observation)
        last = state[ORDER][..., 0].masked_fill(~self._candidates(observation), -torch.inf)
        if order is None:
            order = last.argsort(dim=-1, descending=True, stable=True)
        else:
            order = order.gather(-1, last.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        return smooth_along(raw, observation, order, self.window, self.kernel, "avg")

    def _candidates(self, observation: Observation) -> Tensor:
        return observation.occupied & ~observation.newest(self.window)
