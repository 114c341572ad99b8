"""The inputs of a model's attention layers, for policies that score tokens by hidden states (`Needs.hidden`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WATCHED: WeakSet[nn.Module] = WeakSet()


class ReadsHidden:
    """A cache that receives the input [B,M,hidden] of the attention layer that runs, if a policy `reads_hidden`."""

    hidden: Tensor | None = None

    @property
    def reads_hidden(self) -> bool:
        raise NotImplementedError


def watch_inputs(model: PreTrainedModel) -> None:
    """Pass the input of every attention layer to caches that read it. Further calls for a model do nothing."""
    for module in model.modules():
        if hasattr(module, "layer_idx") and module not in _WATCHED:
            _WATCHED.add(module)
            module.register_forward_pre_hook(_pass_on, with_kwargs=True)


def _pass_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, ReadsHidden) and cache.reads_hidden:
        cache.hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
