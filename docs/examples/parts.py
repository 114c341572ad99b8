"""One small part of each kind."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.allocators.allocator import Allocator
from kvbench.policies.mergers.merger import Eviction, Merged, Merger, MergeState
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.stores.codec import Codec
from kvbench.policies.values.value import ValueAware


@dataclass(frozen=True)
class LargeKeys(Scorer):
    """Keep the keys of large norm."""

    needs = Needs(keys=True)

    def score(self, observation: Observation, state: State) -> Tensor:
        return observation.keys.float().norm(dim=-1)  # [B,H_kv,T,D] -> [B,H_kv,T], higher = keep


@dataclass(frozen=True)
class ByNorm(ValueAware):
    """Multiply the score by the norm of the value."""

    def score(
        self,
        scorer: Scorer,
        scores: Tensor,
        observation: Observation,
        state: State,
        protected: Tensor,
        layer_wide: bool,
    ) -> Tensor:
        norms = observation.values.float().norm(dim=-1)
        return scores * (norms.mean(1, keepdim=True) if layer_wide else norms)  # one row for all heads of a layer


@dataclass(frozen=True)
class FirstMore(Allocator):
    """The first layer gets `extra` slots more than its share, the last layer `extra` slots less."""

    extra: int = 4

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        base, more = divmod(total, layers)
        budgets = [base + (layer < more) for layer in range(layers)]
        moved = min(self.extra, budgets[-1] - floor)
        return [budgets[0] + moved, *budgets[1:-1], budgets[-1] - moved]  # the sum is exact


@dataclass(frozen=True)
class IntoNewest(Merger):
    """Add `share` of the mean of the evicted values to the newest kept token."""

    share: float = 0.1

    def absorb(self, eviction: Eviction, memory: MergeState) -> Merged | None:
        newest = eviction.positions.masked_fill(~eviction.kept, -1).argmax(-1, keepdim=True)  # [B,H_kv,1]
        slot = newest[..., None].expand(-1, -1, -1, eviction.values.shape[-1])
        evicted = eviction.evicted[..., None]  # [B,H_kv,T,1]
        number = evicted.sum(2, keepdim=True)
        mean = (eviction.values * evicted).sum(2, keepdim=True) / number.clamp(min=1)
        value = eviction.values.gather(2, slot)
        value = torch.where(number > 0, (1 - self.share) * value + self.share * mean, value)
        return Merged(newest, eviction.keys.gather(2, slot), value)


@dataclass(frozen=True)
class Half(Codec):
    """Keys and values in float16, once the prompt is complete and evicted."""

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        return {"codes": x.half()}

    def decode(self, codes: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        return codes["codes"].float()
