"""VaSE: keep tokens whose values have a large range, and a sample of the others by attention, drawn anew each time.

Shapes: B batch, H KV heads, G query heads per KV head, w queries of the window, T slots, D head dim.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.references import attention_logits, widen
from kvbench.kernels.selection import LAST
from kvbench.policies.checks import check_choices, choice, number, whole_number
from kvbench.policies.constants import on_device
from kvbench.policies.draws import combined_seed, uniform_draws
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.pooling import check_kernel, smooth
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.windows import attention_before


@dataclass(frozen=True)
class VaSE(Scorer):
    """Keep the tokens with the largest range of values, sample others in proportion to attention, and keep the window.

        m_j = max_d v_(j,d) - min_d v_(j,d), "infinite for sinks"
        p_(h,q,j) = "softmax"_(j in C)(q_(h,q) * k_j / (sqrt(D) "temperature"))
        a_j = "avg-pool"_j 1 / (G w) sum_(h in "group", q in "window") p_(h,q,j)
        E_j = - ln u("seed", "layer", "head", j, "eviction"), 0 <= u < 1

    C are the tokens before the window. L, the `large` tokens of C with the largest m, rank highest, then the others by
    a_j / E_j: keeping the best of these is sampling without replacement in proportion to a. Draws are new at every
    eviction, whose number is that of the tokens seen. A token without attention ranks below all others, by m.

    value: the `range` of a value's numbers, their variance `var`, or their norm `l2`. large: number of tokens in L, or,
    below 1, the share of the budget. sinks: first tokens, which lead L. window: number of newest queries, which score
    and are kept. kernel: odd number of pooled neighbours. temperature: of the softmax. sample: false: keep the largest.
    seed: of the draws; every example and sampled answer of a run has its own (`for_example`).
    Source: arXiv 2606.03928; its code evicts when a multiple of 64 tokens is held, so that a prompt stays whole until
    then (the schedule's late=true is the nearest).
    """

    value: Literal["range", "var", "l2"] = "range"
    large: float = 0.25
    sinks: int = 4
    window: int = 64
    kernel: int = 5
    temperature: float = 1.0
    sample: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        check_kernel(self.kernel)
        choice("sample", self.sample, True, False)
        number("large", self.large, 0)
        if self.large >= 1 and self.large != int(self.large):
            raise ConfigError("large", self.large, "a whole number of tokens, or a share below 1 of the budget")
        number("temperature", self.temperature, 1e-9)
        for name, least in (("sinks", 0), ("window", 1), ("seed", 0)):
            whole_number(name, getattr(self, name), least)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, layer=True, keys=True)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.window, others=1)

    def score(self, observation: Observation, state: State) -> Tensor:
        before = observation.occupied & ~observation.newest(self.window)
        magnitude = self.magnitude(observation).masked_fill(~before, -torch.inf)
        positions = observation.positions.long().masked_fill(~observation.occupied, LAST)
        oldest = positions.argsort(dim=-1, descending=True, stable=True)  # the last of equal ones is the oldest
        by_magnitude = oldest.gather(-1, magnitude.gather(-1, oldest).argsort(dim=-1, stable=True))
        rank = torch.empty_like(by_magnitude).scatter_(
            -1, by_magnitude, torch.arange(by_magnitude.shape[-1]).to(by_magnitude).expand_as(by_magnitude)
        )
        counts = tuple(self._large(budget) for budget in observation.sequences.budgets)
        first = on_device(counts, rank.device)[:, None, None]
        large = rank >= rank.shape[-1] - first
        chance = self.attention(observation)
        if self.sample:
            chance = chance / self.exponentials(observation)
        chance = chance.masked_fill(large, torch.inf).masked_fill(~before, -1.0)
        order = by_magnitude.gather(-1, chance.gather(-1, by_magnitude).argsort(dim=-1, stable=True))
        ranks = torch.arange(order.shape[-1], dtype=torch.float32, device=order.device).expand_as(order)
        return torch.empty_like(ranks).scatter_(-1, order, ranks)

    def for_example(self, run_seed: int, example: int) -> Self:
        return replace(self, seed=combined_seed(self.seed, run_seed, example))

    def _large(self, budget: int) -> int:
        """The number of tokens in L at a budget."""
        count = int(self.large) if self.large >= 1 else round(self.large * budget)
        return max(min(count, budget - self.window), 0)

    def magnitude(self, observation: Observation) -> Tensor:
        """m, [B,H,T]."""
        values = widen(observation.values)
        if self.value == "range":
            found = values.amax(-1) - values.amin(-1)
        else:
            found = values.var(-1) if self.value == "var" else values.norm(dim=-1)
        return found.masked_fill(observation.first(self.sinks), torch.inf) if self.sinks else found

    def attention(self, observation: Observation) -> Tensor:
        """a, [B,H,T]."""
        assert observation.window is not None
        queries, places = observation.window.newest(self.window)
        params = observation.params
        logits = attention_logits(queries, observation.keys, params.scaling / self.temperature, params.softcap)
        rows = attention_before(logits, places, observation, self.window)
        real = (places >= 0).sum(-1).clamp(min=1)
        mean = rows.sum((2, 3)) / (rows.shape[2] * real[:, None, None])
        return smooth(mean, observation, self.window, self.kernel, "avg")

    def exponentials(self, observation: Observation) -> Tensor:
        """E, [B,H,T]."""
        draws = uniform_draws(self.seed, observation.layer, observation.positions, observation.seen)
        return -draws.clamp(min=torch.finfo(draws.dtype).tiny).log()
