"""Recurrent and convolutional layers, with a state of constant size per sequence that no policy reduces.

Every sequence holds its own states. For a call of several sequences, a layer concatenates them once, and the sequences
then hold views of the result, because models may change a state in place.

Shapes: B batch, D channels, M new tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvbench.cache.extra import Extra
from kvbench.cache.families import InterfaceError, Layout
from kvbench.cache.interface import NoRollback
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.views import KVLayer
from kvbench.errors import counted


class RecurrentLayer(NoRollback, LinearAttentionCacheLayerMixin):
    """The states of one layer for all sequences, with the interface of transformers. index: in the model."""

    is_compileable = False
    is_croppable = False
    record_past = False

    def __init__(self, sequences: Sequence[CachedSequence], index: int, layout: Layout) -> None:
        self._sequences = sequences
        self._name = str(index)
        self._continues = layout.continues
        self.number_of_states = layout.states[index]
        self._joined: dict[str, tuple[Tensor, Sequence[Tensor]]] = {}  # states of all sequences, and their parts

    @property
    def conv_states(self) -> Mapping[int, Tensor | None]:  # type: ignore[override]
        """The newest inputs of each convolution, [B,D,kernel]."""
        return {number: self._state(f"conv.{number}") for number in range(self.number_of_states)}

    @property
    def recurrent_states(self) -> Mapping[int, Tensor | None]:  # type: ignore[override]
        """The state of each recurrence, [B,...]."""
        return {number: self._state(f"recurrent.{number}") for number in range(self.number_of_states)}

    @property
    def has_previous_state(self) -> Mapping[int, bool]:  # type: ignore[override]
        """Whether there was a token before this call."""
        return {number: state is not None for number, state in self.conv_states.items()}

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: the first update creates a state."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        """Append the inputs [B,D,M] of new tokens; returns all inputs of the convolution, earlier ones first."""
        before, new = self._state(f"conv.{state_idx}"), conv_states.shape[-1]
        if before is None:
            size, inputs = conv_kernel_size or new, conv_states
        else:
            size, inputs = before.shape[-1], torch.cat([before, conv_states], dim=-1)
            if new > 1 and not self._continues:
                raise InterfaceError(
                    f"a call brings {counted(new, 'token')} after others, but the recurrent layers of this "
                    "model restart at every "
                    "call of several tokens: pass the prompt in one call, and later tokens one by one"
                )
        if inputs.shape[-1] < size:
            inputs = F.pad(inputs, (size - inputs.shape[-1], 0))
        self._set(f"conv.{state_idx}", inputs[..., -size:])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Replace a state [B,...]."""
        self._set(f"recurrent.{state_idx}", recurrent_states)
        return recurrent_states

    def _state(self, name: str) -> Tensor | None:
        """A state of all sequences, None before the first token."""
        name = f"{self._name}.{name}"
        for states in (sequence.states for sequence in self._sequences):
            if name in states and states[name].is_inference() and not torch.is_inference_mode_enabled():
                states[name] = states[name].clone()  # so that it can be changed outside of that mode
        parts = [one.states[name] for one in self._sequences if name in one.states]
        if len(parts) <= 1:
            return parts[0] if parts else None
        joined, known = self._joined.get(name, (parts[0], ()))
        if list(map(id, known)) != list(map(id, parts)):
            joined = torch.cat(parts)
            known = joined.split(1)
            self._joined[name] = joined, known
            for sequence, part in zip(self._sequences, known, strict=True):
                sequence.states[name] = part
        return joined

    def _set(self, name: str, new: Tensor) -> None:
        """Replace a state in place, or create it."""
        state = self._state(name)
        if state is not None:
            state.copy_(new)
            return
        count = len(self._sequences)
        parts = new.split(1) if len(new) == count else [new] * count  # one prompt of several sequences
        for sequence, part in zip(self._sequences, parts, strict=True):
            sequence.states[f"{self._name}.{name}"] = part.clone()
            sequence.note(change=part.nbytes)


class RecurrentKVLayer(KVLayer, RecurrentLayer):
    """A layer with a recurrent state, and with keys and values. place: among the attention layers."""

    def __init__(self, sequences: Sequence[CachedSequence], place: int, index: int, layout: Layout) -> None:
        KVLayer.__init__(self, sequences, place)
        RecurrentLayer.__init__(self, sequences, index, layout)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do, as in both base classes."""


class RecurrentLayers(Extra):
    """Refuses a later prompt of a batch that is padded, because padding would change the states."""

    def begin_call(self, sequences: Sequence[CachedSequence], mask: Tensor | None) -> None:
        padded = [] if mask is None or mask.shape[1] == 1 else (~mask).any(-1).tolist()
        for row, (sequence, is_padded) in enumerate(zip(sequences, padded, strict=False)):
            if sequence.seen and is_padded:
                raise ValueError(
                    f"sequence {row} is padded after the {counted(sequence.seen, 'token')} it has seen, which "
                    "would change the "
                    "states of recurrent layers: pass later prompts of equal length, or one by one"
                )
