"""The interface of backends.

Shapes: L layers, P rows of a step, k layers and b rows of a group, n = k * b, H_q query heads, H KV heads, T slots of
the longest row, D head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.cache.memory import FlatMemory
from kvbench.kernels.references import NewTokens
from kvbench.policies.mergers.merger import Vectors
from kvbench.policies.observation import AttentionParams, Observation, State, StepCache
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.store import LayerStore


@dataclass(frozen=True)
class LayerStep:
    """One layer of a step: queries [P,H_q,1,D] at positions [P,1], and the new tokens with their slots.

    gone [P,H]: slots of the tokens that new ones displace from a ring. longest: bound of the length of a segment.
    appended: the new tokens are in their slots already, because this is another layer that reads them.
    """

    index: int
    queries: Tensor
    new: NewTokens
    gone: Tensor
    positions: Tensor
    longest: int
    params: AttentionParams
    appended: bool = False


@dataclass(frozen=True)
class Segments:
    """The segments of a group's rows in some layers: starts, counts [k,b,H]; columns [T]: slots of the longest one."""

    layers: tuple[int, ...]
    which: slice | Tensor
    rows: slice
    starts: Tensor
    counts: Tensor
    columns: Tensor


class GroupSlots(ABC):
    """The slots of n = k * b rows: k layers of the b sequences of a group.

    positions [n,H,T] int32, -1 = empty. state: running statistics [n,H,T,G'] by name. bias [n,H,T]: of the slots, if
    they have one. known: the newest attention, if a policy uses it. packed: no slot is empty.
    """

    positions: Tensor
    state: State
    known: StepCache
    bias: Tensor | None = None
    packed = False

    @abstractmethod
    def vectors(self, name: str) -> Vectors:
        """Keys or values [n,H,T,D]."""

    @abstractmethod
    def store_state(self) -> None:
        """Write the statistics back."""

    @abstractmethod
    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace keys and values [n,H,m,D] at slots [n,H,m]."""


class Backend(ABC):
    """workspace: bytes of keys, values and attention rows of an eviction in memory at once. growth: how many times as
    large flat memory becomes, at least, when it is full. reserved: number of slots that no sequence has.
    reads_at_once: the host reads numbers without a wait. evicts_codes: it evicts from codes of single tokens.
    """

    workspace: ClassVar[int]
    growth: ClassVar[float]
    reserved: ClassVar[int]
    reads_at_once: ClassVar[bool]
    evicts_codes: ClassVar[bool]

    # --- a prompt or its blocks, of one sequence ---------------------------------------------------------------------
    @abstractmethod
    def attend_slots(
        self, queries: Tensor, positions: Tensor, held: LayerStore, params: AttentionParams, fresh: bool, in_order: bool
    ) -> Tensor:
        """Attention [1,H_q,m,D] of queries [1,H_q,m,D] at positions [1,m] over the slots of a store.

        params: without a sliding window that hides no token. fresh: the slots are the tokens of the queries, in order.
        in_order: their tokens are the last slots, in order, and no slot is empty.
        """

    def attend_newest(self, seen: Observation) -> tuple[Tensor, Tensor] | None:
        """Attention of a decoded token, and its weights for the scorer; None without such a kernel."""
        return None

    def attend_prompt(self, seen: Observation, in_order: bool) -> tuple[Tensor, Tensor] | None:
        """Attention of the queries of a prompt, and its log-sum-exp [1,H_q,m]; None without such a kernel."""
        return None

    # --- a step of a table -------------------------------------------------------------------------------------------
    @abstractmethod
    def begin(self, memory: FlatMemory, lengths: Mapping[str, Tensor], layers: Sequence[Sequence[Layer]]) -> None:
        """Begin a step whose new tokens have their slots. layers: of every row, none for padding."""

    @abstractmethod
    def attend(
        self, step: LayerStep, memory: FlatMemory, lengths: Mapping[str, Tensor], codec: Coding | None
    ) -> Tensor:
        """Append the new tokens of a layer, unless that is done, and attend to all: [P,H_q,1,D]."""

    def end(self) -> None:  # noqa: B027 - optional
        """End a step, whose evictions are done."""

    @abstractmethod
    def collect_weights(self, memory: FlatMemory, heads: int) -> None:
        """Keep the attention of the newest queries, of `heads` query heads per KV head, from now on."""

    @abstractmethod
    def slots(self, memory: FlatMemory, segments: Segments, statistics: tuple[str, ...], width: int) -> GroupSlots:
        """The slots of some rows. statistics: names of the running statistics, with `width` numbers per slot."""
