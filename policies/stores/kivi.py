"""KIVI: keys quantised per channel, values per token, the newest tokens in full precision. KCVC: both per channel."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.policies.checks import whole_number
from kvbench.policies.stores.codes import ChannelCodes, Column, TokenCodes
from kvbench.policies.stores.quantised import QuantisedLayerStore, QuantisedStore, value_group
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import GROWTH


class GroupedStore(QuantisedStore):
    """A store with a rule for when each side's oldest exact tokens are quantised."""

    @abstractmethod
    def due(self, side: int, tokens: int) -> int:
        """How many of a tail's tokens to quantise now, oldest first; side 0: keys, 1: values."""


class GroupedLayerStore(QuantisedLayerStore):
    """A layer of KIVI or KCVC."""

    store: GroupedStore

    def flush(self, prompt: bool) -> None:
        for side, column in enumerate(self._columns):
            column.quantise(self.store.due(side, column.tail.count))


def check_residual(group: int, residual: int) -> None:
    """ValueError unless keys are quantised in whole groups whenever the residual is full."""
    whole_number("group", group, 1)
    whole_number("residual", residual, 0)
    if residual % group:
        raise ConfigError(
            "residual", residual, why=f"must be 0 or a multiple of group={group}: keys are quantised in whole groups"
        )


@dataclass(frozen=True)
class Kivi(GroupedStore):
    """Keys in groups of `group` tokens per channel, values in groups of min(group, D) channels per token.

        hat(x) = Delta * round((x - m) / Delta) + m, m = min x, Delta = (max x - min x) / (2^bits - 1)

    Keys are quantised `residual` tokens at a time (with residual 0: `group` at a time), so that their tail grows
    to that length and empties; of the values all but the newest `residual` are. Keys are those after rotation.

    group: tokens (keys) or channels (values) that share a scale. residual: newest tokens that are exact.
    Source: Liu et al. 2024, arXiv 2402.02750, algorithm 1, and its code (jy-yuan/KIVI, models/llama_kivi.py).
    """

    slug_letters: ClassVar[Mapping[str, str]] = {"g": "group", "r": "residual", "int": "bits"}

    group: int = 128
    residual: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_residual(self.group, self.residual)

    def check_shape(self, heads: int, dim: int) -> None:
        value_group(self.group, dim)

    def due(self, side: int, tokens: int) -> int:
        size = self.residual or self.group
        return tokens // size * size if side == 0 else max(tokens - self.residual, 0)

    def empty(self, dense: SlotStore, values: Tensor) -> QuantisedLayerStore:
        return GroupedLayerStore(self, dense, *kivi_columns(self, self.group, values.shape[-1]))


def kivi_columns(store: QuantisedStore, group: int, dim: int) -> tuple[Column, Column]:
    """Empty columns: keys per channel, values of D numbers per token."""
    keys, values = ChannelCodes(store.quantiser, group), TokenCodes(store.quantiser, value_group(group, dim), GROWTH)
    return Column(keys), Column(values)


class UngroupedLayerStore(GroupedLayerStore):
    """One group per channel over the due tokens of the prompt, then one for every later block of the residual."""

    def flush(self, prompt: bool) -> None:
        for side, column in enumerate(self._columns):
            due = self.store.due(side, column.tail.count)
            if prompt and due:
                column.chunks.insert(0, ChannelCodes(self.store.quantiser, due))
                column.quantise(due, chunk=0)
        super().flush(prompt)


@dataclass(frozen=True)
class Kcvc(GroupedStore):
    """Keys and values in groups of `group` tokens per channel, both `residual` tokens at a time, as KIVI does its keys.

        hat(x) = Delta * round((x - m) / Delta) + m, m = min x, Delta = (max x - min x) / (2^bits - 1)

    group: tokens that share a scale in a channel; null: no groups, the prompt's tokens share one scale per channel, and
    so does every later block of `residual`. residual: tokens that are quantised together.
    Source: the variant named in CAKE (Qin et al., ICLR 2025), appendix E; the schedule is KIVI's.
    """

    slug_letters: ClassVar[Mapping[str, str]] = {"g": "group", "r": "residual", "int": "bits"}

    group: int | None = 128
    residual: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is None:
            whole_number("residual", self.residual, 1)
        else:
            check_residual(self.group, self.residual)

    @property
    def apart(self) -> str:
        return "which kcvc with group=null cannot hold: set a group" if self.group is None else ""

    def due(self, side: int, tokens: int) -> int:
        size = self.residual or self.group or 1
        return tokens // size * size

    def empty(self, dense: SlotStore, values: Tensor) -> QuantisedLayerStore:
        keys_and_values = (Column(ChannelCodes(self.quantiser, self.group or self.residual)) for _ in range(2))
        return (UngroupedLayerStore if self.group is None else GroupedLayerStore)(self, dense, *keys_and_values)
