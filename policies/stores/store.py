"""The contract of a store: how one layer's kept tokens are held.

Shapes: B batch, H KV heads, C slots in use, T new tokens, D head dim (keys and values may differ).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from torch import Tensor

from kvbench.policies.observation import AttentionParams, Observation, State


class Segments(NamedTuple):
    """Where the slots of every KV head begin in a layer's memory, the tokens it holds, its next free slot: [B,H] each.

    most: tokens of the fullest head.
    """

    starts: Tensor
    held: Tensor
    free: Tensor
    most: int


class LayerStore(ABC):
    """What one layer holds. Slots are addressed per KV head; a slot at position -1 is empty."""

    evicted: bool = False
    """Whether several tokens were evicted at once, so that slot i may hold another one than the i-th."""

    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """[B,H,C,D] keys as attention sees them."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """[B,H,C,D] values as attention sees them."""

    @property
    @abstractmethod
    def positions(self) -> Tensor:
        """[B,H,C] int32 original positions, -1 = empty slot."""

    @property
    def bias(self) -> Tensor | None:
        """[B,H,C] float32 added to the logits of a slot; None where no slot has one."""
        return None

    @property
    @abstractmethod
    def state(self) -> State:
        """Running statistics [B,H,C,G'] by name; after changing them in place call `remember`."""

    def remember(self, state: State) -> None:  # noqa: B027 - where `state` is a view there is nothing to do
        """Take in statistics that were changed in place in what `state` returned."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Every byte of every tensor held: preallocated slots, positions and statistics included."""

    @property
    @abstractmethod
    def spare_nbytes(self) -> int:
        """Those of them in which no token lies: room made for tokens to come, and slots of evicted ones."""

    @abstractmethod
    def expect(self, tokens: int) -> None:
        """No more than so many tokens will come, one at a time: room is made for no more than these."""

    @property
    @abstractmethod
    def packed(self) -> bool:
        """No slot in use is empty."""

    @property
    @abstractmethod
    def ascending(self) -> bool:
        """Slots in use are in order of position, empty ones last."""

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        """Take T new tokens in: keys, values [B,H,T,D], positions [B,T]; `absent`: some are -1 (padding).

        Keys and values may be kept as they are, but not written into: the caches of several variants share a prompt's.
        """

    @abstractmethod
    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        """Hold only the slots of mask [B,H,C], in order of position, with room for `spare` more tokens.

        counts: how many those are in each head, per sequence, if that is known: nobody waits for a GPU then.

        Returns the old slots [B,H,n] that became slots 0..n-1 (empty ones, where heads keep fewer than n, at the end).
        """

    @abstractmethod
    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        """Replace keys and values [B,H,n,D] at slots [B,H,n]; their positions and statistics stay (merging).

        bias [B,H,n]: of these slots from now on, which only `exact` stores hold; others keep theirs, 0 at first.
        """

    def parts(self) -> dict[str, int]:
        """The bytes of `nbytes` by kind, for tables; stores without kinds say one number."""
        return {"tokens": self.nbytes}

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        """Attention [B,H_q,M,D] straight on what is held, for queries [B,H_q,M,D] at positions [B,M] (-1: padding).

        None where attention is to read the views `keys`, `values` and `positions` instead.
        """
        return None

    watching: bool = False
    """Whether the step whose tokens were just appended is to be shown to `observe`."""

    def observe(self, observation: Observation, prompts: Sequence[int | None]) -> None:  # noqa: B027 - most need not
        """See a step's attention before it is evicted or settled; prompts: every sequence's prompt length in tokens."""

    def settle(self) -> None:  # noqa: B027 - most stores hold tokens as they came
        """The step is over (attended, evicted) and the prompt is in: bring what is held into its final form."""

    @abstractmethod
    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        """Empty one slot per KV head, [B,H,1], to be overwritten by the next token; `rows`: only in these sequences."""


class Store(ABC):
    """Opens what a layer holds. Subclasses are frozen dataclasses of their knobs, and say what they can do.

    What `open` gives must also take tensors on the meta device, so that its bytes are known before it runs.
    """

    exact: ClassVar[bool] = False
    """Whether a token's key and value are the model's own, whenever they are looked at."""

    replayable: ClassVar[bool] = False
    """Whether decoding steps may be recorded (CUDA): tokens lie where a `DeviceBatch` can hold them."""

    reopens: ClassVar[bool] = True
    """Whether tokens can still be given up once a prompt was settled, so that another one can be evicted."""

    slug_letters: ClassVar[Mapping[str, str]] = {}
    """The letters by which a policy's name sets fields: with {"g": "group"}, `kivi_g32` has group=32."""

    @abstractmethod
    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        """An empty layer for tensors like keys, values [B,H,*,D], with `width` numbers per slot for each statistic."""

    def for_layer(self, index: int) -> "Store":
        """The store of one layer, where layers differ."""
        return self

    def check_shape(self, heads: int, dim: int) -> None:  # noqa: B027 - most take any
        """ValueError if values of `heads` KV heads with `dim` numbers each do not divide into this store's groups."""

    def check_layers(self, layers: int) -> None:  # noqa: B027 - most name none
        """ValueError if a field names a layer that a model with `layers` of them does not have."""

    def check_policy(self, name: str, evicts_in_decode: bool, per_head: bool) -> None:  # noqa: B027 - most take any
        """ValueError if an evicting policy asks for what this store cannot hold.

        evicts_in_decode: it evicts single tokens while decoding; per_head: KV heads hold different numbers of tokens.
        """
