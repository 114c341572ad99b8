"""KCVC: keys and values both quantised per channel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.policies.checks import whole_number
from kvbench.policies.stores.codes import ChannelCodes
from kvbench.policies.stores.column import Column
from kvbench.policies.stores.kivi import GroupedLayerStore, GroupedStore, check_residual
from kvbench.policies.stores.quantised import QuantisedLayerStore
from kvbench.policies.stores.slot_store import SlotStore


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
