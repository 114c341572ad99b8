"""What a layer asks of the cache it is part of, so that it need not know that cache.

Shapes: B batch, H_q query heads, M new tokens.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache.budgets import Budgets
from kvbench.cache.evidence import Evidence
from kvbench.cache.steps import Slice
from kvbench.policies.policy import Policy


class Whole(Protocol):
    """The cache, as its layers see it."""

    config: PreTrainedConfig
    policy: Policy
    budgets: Budgets
    shared: dict[str, Tensor]

    @property
    def layers(self) -> Sequence[CacheLayerMixin]: ...
    @property
    def prompts(self) -> list[int]: ...
    @property
    def seen_before(self) -> int: ...
    def check_attention(self) -> None: ...
    def check_model(self, module: nn.Module) -> None: ...
    def slices(self, index: int, queries: Tensor, mask: Tensor | None) -> list[Slice]: ...
    def fail(self, error: Exception) -> None: ...
    def evict(self, index: int, shown: Evidence) -> None: ...
    def layer_done(self, index: int) -> None: ...
    def note_bytes(self, index: int) -> None: ...
    def note_broken(self, index: int, sequences: Sequence[int]) -> None: ...
