"""The inputs of a model's attention layers, for policies that score tokens by hidden states (`Needs.hidden`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn

from kvbench.cache.extra import Extra, When
from kvbench.cache.step import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WATCHED: WeakSet[nn.Module] = WeakSet()


class HiddenInputs(Extra):
    """The input [B,M,hidden] of the attention layer that runs."""

    hidden: Tensor | None = None
    of: nn.Module | None = None  # the layer

    def before_eviction(self, step: Step) -> When:
        """Add the input of the step's tokens to its observation; an eviction that waited has that of its own layer."""
        if step.policy.needs.hidden and step.observed and "hidden" not in step.observation.shared:
            if self.hidden is None:
                raise ValueError(
                    f"{step.policy.name} scores tokens by the input of attention, which model.generate does not pass "
                    "to its cache: use kvbench.generate"
                )
            own = self.hidden[step.row : step.row + 1, step.first : step.first + step.queries.shape[2]]
            step.observation.shared = {**step.observation.shared, "hidden": own}
        return "now"


def watch_inputs(model: PreTrainedModel) -> None:
    """Pass the input of every attention layer to caches that read it. Further calls for a model do nothing."""
    for module in model.modules():
        if hasattr(module, "layer_idx") and module not in _WATCHED:
            _WATCHED.add(module)
            module.register_forward_pre_hook(_pass_on, with_kwargs=True)


def _pass_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache: Any = kwargs.get("past_key_values", kwargs.get("layer_past"))  # its name in GPT-NeoX and older models
    for extra in getattr(cache, "extras", ()):
        if isinstance(extra, HiddenInputs):
            extra.of = module
            extra.hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
