"""The interface of stores, which hold the tokens of a layer.

Shapes: H KV heads, C slots in use, T new tokens, M queries, D head dim (keys and values may differ).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from torch import Tensor

from kvbench.policies.observation import AttentionParams, Observation, SlotInfo, State


class Sizes(NamedTuple):
    """Bytes of a store. kinds: all of them, by kind, for tables. spare: those without a token, which are of no kind of
    their own: slots reserved for later tokens, and slots of evicted ones.
    """

    kinds: dict[str, int]
    spare: int


class LayerStore(ABC):
    """The tokens of one layer of one sequence. Slots are addressed per KV head; a slot at position -1 is empty."""

    # --- contents --------------------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """[1,H,C,D] keys as attention sees them."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """[1,H,C,D] values as attention sees them."""

    @property
    @abstractmethod
    def positions(self) -> Tensor:
        """[1,H,C] int32 original positions, -1 = empty slot."""

    @property
    @abstractmethod
    def slots(self) -> SlotInfo:
        """Order and bias of the slots in use; `whole` and `moved` are left to the caller."""

    @property
    @abstractmethod
    def state(self) -> State:
        """Running statistics [1,H,C,G'] by name; set it again after a change in place."""

    @state.setter
    @abstractmethod
    def state(self, state: State) -> None: ...

    # --- bytes -----------------------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all tensors, with spare slots, positions and statistics."""

    @abstractmethod
    def sizes(self) -> Sizes:
        """The bytes of `nbytes` by kind, and how many of them hold no token."""

    @abstractmethod
    def expect(self, tokens: int) -> None:
        """Reserve slots for no more than this number of later tokens, which come one at a time."""

    # --- a step ----------------------------------------------------------------------------------------------------
    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Append T new tokens: keys, values [1,H,T,D], positions [1,T].

        The tensors may be stored without a copy, but not changed: caches of several policies share those of a prompt.
        """

    @abstractmethod
    def keep(self, mask: Tensor, spare: int, count: int | None = None) -> Tensor:
        """Keep only the slots of mask [1,H,C], in order of position, and reserve `spare` slots after them.

        count: tokens kept in every KV head, if known, so that the host does not wait for a GPU.

        Returns the old slots [1,H,n] that became slots 0..n-1 (empty ones, if heads keep fewer than n, at the end).
        """

    @abstractmethod
    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        """Replace keys and values [1,H,n,D] at slots [1,H,n] (merging); positions and statistics stay.

        bias [1,H,n]: the new bias of these slots, for `exact` stores only; other slots keep theirs, 0 at first.
        """

    # --- stores that change the form of their tokens once the prompt is complete ------------------------------------
    @property
    def watching(self) -> bool:
        """Whether `observe` needs the step of the tokens that were just appended."""
        return False

    def observe(self, observation: Observation, prompt: int) -> None:  # noqa: B027 - optional
        """See a step's attention before it evicts; prompt: its length in tokens."""

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        """Attention [1,H_q,M,D] of queries [1,H_q,M,D] at positions [1,M] (-1: padding), from the stored form.

        None if attention should read the views `keys`, `values` and `positions` instead.
        """
        return None

    def settle(self) -> None:  # noqa: B027 - optional
        """End a step (attended, evicted) after the prompt is complete: bring the tokens into their final form."""


class Store(ABC):
    """Opens the stores of layers. Subclasses are frozen dataclasses of their parameters.

    The result of `open` must also accept tensors on the meta device, which predict its bytes.
    """

    exact: ClassVar[bool] = False
    """Whether keys and values are always the model's own."""

    replayable: ClassVar[bool] = False
    """Whether CUDA graphs may record decoding steps: a table can hold the tokens."""

    reopens: ClassVar[bool] = True
    """Whether tokens of a complete prompt can still be evicted, so that a cache can take another prompt."""

    reads_model: ClassVar[bool] = False
    """Whether `observe` needs the layer of the model (`Observation.model`)."""

    slug_letters: ClassVar[Mapping[str, str]] = {}
    """Letters of a policy's name that set fields: with {"g": "group"}, `kivi_g32` has group=32."""

    @abstractmethod
    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        """An empty layer for tensors like keys, values [1,H,*,D], with `width` numbers per slot for each statistic."""

    def for_layer(self, index: int) -> "Store":
        """The store of one layer, if layers differ."""
        return self

    def check_shape(self, heads: int, dim: int) -> None:  # noqa: B027 - optional
        """ValueError if values of `heads` KV heads with `dim` numbers each do not divide into this store's groups."""

    def check_layers(self, layers: int) -> None:  # noqa: B027 - optional
        """ValueError if a field names a layer that a model with `layers` layers does not have."""

    def check_policy(self, name: str, evicts_in_decode: bool, per_head: bool) -> None:  # noqa: B027 - optional
        """ValueError if this store does not support the evictions of a policy.

        evicts_in_decode: single tokens while decoding; per_head: KV heads hold different numbers of tokens.
        """
