"""Recurrent and convolutional layers: a state of one size for each sequence, which no policy makes smaller.

A state goes with its sequence: every group holds those of its own rows, and where several groups are called together
a layer shows them as one tensor, of which each group then holds its rows. So models may write into what they are shown.

Shapes: B batch, D channels, M new tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvbench.cache.group import PolicyGroup
from kvbench.cache.interface import InterfaceError, NoRollback
from kvbench.cache.layer import KVLayer
from kvbench.cache.layout import Layout


class RecurrentLayer(NoRollback, LinearAttentionCacheLayerMixin):
    """The states of one layer for all sequences, in the form that transformers uses.

    index: the layer's, in the model.
    """

    is_compileable = False
    is_croppable = False
    record_past = False

    def __init__(self, groups: Sequence[PolicyGroup], index: int, layout: Layout) -> None:
        self._groups = groups
        self._name = str(index)
        self._continues = layout.continues
        self.number_of_states = layout.states[index]
        self._shown: dict[str, tuple[Tensor, list[Tensor]]] = {}

    @property
    def conv_states(self) -> Mapping[int, Tensor | None]:  # type: ignore[override]
        """The newest inputs of each convolution, [B,D,kernel]."""
        return {number: self._held(f"conv.{number}") for number in range(self.number_of_states)}

    @property
    def recurrent_states(self) -> Mapping[int, Tensor | None]:  # type: ignore[override]
        """The state of each recurrence, [B,...]."""
        return {number: self._held(f"recurrent.{number}") for number in range(self.number_of_states)}

    @property
    def has_previous_state(self) -> Mapping[int, bool]:  # type: ignore[override]
        """Whether a token came."""
        return {number: held is not None for number, held in self.conv_states.items()}

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: the first tokens make the states."""

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Take in the inputs [B,D,M] of new tokens; returns those that the convolution sees, older ones before them."""
        before = self._held(f"conv.{state_idx}")
        if before is not None and conv_states.shape[-1] > 1 and not self._continues:
            raise InterfaceError(
                f"a call brings {conv_states.shape[-1]} tokens after others, but the model begins its recurrent layers "
                "anew at every call of several tokens: a prompt has to come in one call, what follows token by token"
            )
        size = (conv_kernel_size or conv_states.shape[-1]) if before is None else before.shape[-1]
        seen = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        if seen.shape[-1] < size:
            seen = F.pad(seen, (size - seen.shape[-1], 0))
        self._hold(f"conv.{state_idx}", seen[..., -size:])
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Hold these states [B,...] from now on."""
        self._hold(f"recurrent.{state_idx}", recurrent_states)
        return recurrent_states

    def _held(self, state: str) -> Tensor | None:
        """A state of all sequences, None before the first token."""
        name = f"{self._name}.{state}"
        for group in self._groups:
            group.free_state(name)
        parts = [group.states[name] for group in self._groups if name in group.states]
        if not parts:
            return None
        if len(parts) == 1:
            self._shown.pop(name, None)
            return parts[0]
        shown, rows = self._shown.get(name, (None, []))
        if shown is None or len(rows) != len(parts) or any(x is not y for x, y in zip(rows, parts, strict=True)):
            shown = torch.cat(parts)
            rows = list(shown.split([len(part) for part in parts]))
            self._shown[name] = shown, rows
            for group, part in zip(self._groups, rows, strict=True):
                group.states[name] = part
        return shown

    def _hold(self, state: str, new: Tensor) -> None:
        held = self._held(state)
        if held is not None:
            held.copy_(new)
            return
        sizes = [group.size for group in self._groups]
        alone, one_prompt = len(sizes) == 1, len(new) < sum(sizes)
        parts = [new] * len(sizes) if alone or one_prompt else new.split(sizes)
        for group, part in zip(self._groups, parts, strict=True):
            group.hold_state(f"{self._name}.{state}", part.clone())


class RecurrentKVLayer(KVLayer, RecurrentLayer):
    """A layer with a recurrent state beside keys and values. place: among the layers with keys and values."""

    def __init__(self, groups: Sequence[PolicyGroup], place: int, index: int, layout: Layout) -> None:
        KVLayer.__init__(self, groups, place)
        RecurrentLayer.__init__(self, groups, index, layout)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: the first tokens make stores and states."""


def check_padding(seen: Sequence[int], mask: Tensor) -> None:
    """ValueError where a call of several tokens pads a sequence that has seen some: its states would take padding in.

    seen: tokens of every sequence; mask [B,M] bool marks the real ones of the call."""
    padded = (~mask).any(-1).tolist() if mask.shape[1] > 1 else []
    for row, (before, some) in enumerate(zip(seen, padded, strict=False)):
        if before and some:
            raise ValueError(
                f"sequence {row} is padded after the {before} tokens it has seen, and the states of this model's "
                "recurrent layers would take padding in: give later prompts of a batch one length, or each alone"
            )
