"""DuoAttention: retrieval heads keep every token; streaming heads keep sinks and recent tokens.

Shapes: B batch, L layers, H KV heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors import ConfigError, counted
from kvbench.policies.allocators.allocator import Allocator, required_length
from kvbench.policies.allocators.headkv import read_importance
from kvbench.policies.checks import number, whole_number
from kvbench.policies.describe import FILE
from kvbench.policies.ranking import Ranking


@dataclass(frozen=True)
class DuoAttention(Allocator):
    """Streaming heads, which have the lowest scores, keep the first and the newest tokens; other heads keep the prompt.

        h "streams if" alpha_h "is among the" "round"(r * L * H) "lowest of all layers and KV heads"

    There is no budget: a streaming head holds sinks + recent tokens; any other head holds the whole prompt. Every head
    keeps all generated tokens.

    importance: a JSON file of scores per KV head, keyed "layer-head", in the format of headkv_r.
    sparsity: r, the share of KV heads that stream. sinks: first tokens of a streaming head. recent: its newest tokens.
    Source: Xiao et al. 2024, arXiv 2410.10819, section 2.3.
    """

    per_head: ClassVar[bool] = True
    sets_budget: ClassVar[bool] = True

    importance: str = field(default="", metadata={"decides": FILE})
    sparsity: float = 0.5
    sinks: int = 128
    recent: int = 256

    def __post_init__(self) -> None:
        number("sparsity", self.sparsity, 0, 1)
        whole_number("sinks", self.sinks, 0)
        whole_number("recent", self.recent, 1)
        if not self.importance:
            raise ConfigError(
                "importance", "", why="must be the path of a JSON file with scores per head, as for headkv_r"
            )
        _ = self._streams  # read at construction: the file may change later

    @cached_property
    def _streams(self) -> Tensor:
        """Which KV heads stream, bool [L,H]."""
        scores = read_importance(self.importance)
        lowest = scores.flatten().argsort(stable=True)[: round(self.sparsity * scores.numel())]
        return torch.zeros(scores.numel(), dtype=torch.bool).scatter_(0, lowest, True).view(scores.shape)

    @property
    def exact(self) -> bool:
        return False

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        """The mean over the heads of each layer, rounded down."""
        if layers != len(self._streams):
            raise ConfigError(
                "importance", self.importance, why=f"has {counted(len(self._streams), 'layer')}, the model has {layers}"
            )
        length, width = required_length(length, "duoattention"), self._streams.shape[1]
        few = min(self.sinks + self.recent, length)
        return [(n * few + (width - n) * length) // width for n in self._streams.sum(-1).tolist()]

    def heads(self, layer: int, ranking: Ranking, budgets: Sequence[int]) -> Tensor:
        stored = ranking.occupied.sum(-1)
        if stored.shape[1] != self._streams.shape[1]:
            width = self._streams.shape[1]
            raise ConfigError(
                "importance",
                self.importance,
                why=f"has {width} heads per layer, but the model has {stored.shape[1]} KV heads",
            )
        streams = self._streams[layer].to(stored.device)
        return torch.where(streams, stored.clamp(max=self.sinks + self.recent), stored)
