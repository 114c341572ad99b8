"""KCVC: keys and values both quantised per channel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.policies.checks import whole_number
from kvbench.policies.contents import saved
from kvbench.policies.stores.codes import ChannelCodes
from kvbench.policies.stores.column import Column, Whole, most
from kvbench.policies.stores.dense import DenseStore
from kvbench.policies.stores.kivi import RuledStore, check_residual
from kvbench.policies.stores.per_sequence import open_per_sequence
from kvbench.policies.stores.quantised import QuantisedStore
from kvbench.policies.stores.store import LayerStore


@saved
class UngroupedStore(RuledStore):
    """One group per channel over what of the prompt is due, then one for every later block of the residual."""

    def flush(self, prompt: bool) -> None:
        for column, rule in zip(self._columns, self._rules, strict=True):
            due = most(column.due(rule))
            if prompt and due:
                codes = column.runs[0]
                assert isinstance(codes, ChannelCodes)
                column.runs.insert(0, ChannelCodes(codes.quantiser, due))
                column.quantise(due, run=0)
        super().flush(prompt)


@dataclass(frozen=True)
class Kcvc(QuantisedStore):
    """Keys and values in groups of `group` tokens per channel, both `residual` tokens at a time, as KIVI does its keys.

        hat(x) = Delta * round((x - m) / Delta) + m, m = min x, Delta = (max x - min x) / (2^bits - 1)

    group: tokens that share a scale in a channel; null: no groups, the prompt's tokens share one scale per channel, and
    so does every later block of `residual`. residual: tokens that become codes together.
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

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        if self.group is None:
            return open_per_sequence(self._open, keys, values, statistics, width)
        return self._open(keys, values, statistics, width)

    def _open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        held = UngroupedStore if self.group is None else RuledStore
        unit, rule = self.group or self.residual, Whole(self.residual or self.group or 1)
        key_column, value_column = (Column(ChannelCodes(self.quantiser, unit)) for _ in range(2))
        return held(DenseStore(keys, values, statistics, width), key_column, value_column, (rule, rule))

    def check_policy(self, name: str, evicts_in_decode: bool, per_head: bool) -> None:
        super().check_policy(name, evicts_in_decode, per_head)
        if self.group is None and per_head:
            raise ValueError(
                f"{name} gives KV heads budgets of their own, which kcvc with group=null cannot hold: set a group"
            )
