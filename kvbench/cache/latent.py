"""Layers that store latents, which the model expands to keys and values of all heads before its attention."""

from torch import Tensor

from kvbench.cache.extra import Caller, Extra
from kvbench.cache.hook import LayerCall, expect_expanded
from kvbench.policies.latents import check_latents
from kvbench.policies.policy import Policy


class LatentLayers(Extra):
    """The attention of these layers receives expanded tensors, and the cache the latents."""

    def check(self, policy: Policy) -> None:
        check_latents(policy)

    def new_call(self, cache: Caller, index: int, place: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        expect_expanded(LayerCall(cache, index, keys, values))
        return keys, values
