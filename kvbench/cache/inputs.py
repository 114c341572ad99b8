"""The inputs of a model's attention layers, for policies that score tokens by hidden states (`Needs.hidden`)."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn

from kvbench.cache.extra import Extra
from kvbench.cache.sequence import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WATCHED: WeakSet[nn.Module] = WeakSet()


class HiddenInputs(Extra):
    """The input [B,M,hidden] of the attention layer that runs, if a policy of the cache or an extra pass reads it."""

    hidden: Tensor | None = None
    of: nn.Module | None = None  # the layer
    in_pass = False

    def read_by(self, sequences: List[Sequence]) -> bool:
        """Whether the input is read."""
        return self.in_pass or any(one.policy.needs.hidden for one in sequences)

    def begin_step(self, sequence: Sequence, row: int, columns: slice) -> None:
        if not sequence.policy.needs.hidden:
            return
        if self.hidden is None:
            raise ValueError(
                f"{sequence.policy.name} scores tokens by the input of attention, which model.generate does not pass "
                "to its cache: use kvbench.generate"
            )
        sequence.shared["hidden"] = self.hidden[row : row + 1, columns]


def watch_inputs(model: PreTrainedModel) -> None:
    """Pass the input of every attention layer to caches that read it. Further calls for a model do nothing."""
    for module in model.modules():
        if hasattr(module, "layer_idx") and module not in _WATCHED:
            _WATCHED.add(module)
            module.register_forward_pre_hook(_pass_on, with_kwargs=True)


def _pass_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache: Any = kwargs.get("past_key_values", kwargs.get("layer_past"))  # its name in GPT-NeoX and older models
    for extra in getattr(cache, "extras", ()):
        if isinstance(extra, HiddenInputs) and extra.read_by(cache.sequences):
            extra.of = module
            extra.hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
