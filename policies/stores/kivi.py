"""KIVI: keys quantised per channel, values per token, the newest tokens in full precision."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.policies.checks import whole_number
from kvbench.policies.contents import saved
from kvbench.policies.stores.codes import ChannelCodes, TokenCodes
from kvbench.policies.stores.column import Beyond, Column, Rule, Whole
from kvbench.policies.stores.dense import GROWTH, DenseStore
from kvbench.policies.stores.quantised import QuantisedLayerStore, QuantisedStore, value_group
from kvbench.policies.stores.store import LayerStore


@saved
class RuledStore(QuantisedLayerStore):
    """Each column quantises what its own rule says."""

    def __init__(self, dense: DenseStore, keys: Column, values: Column, rules: tuple[Rule, Rule]) -> None:
        super().__init__(dense, keys, values)
        self._rules = rules

    def flush(self, prompt: bool) -> None:
        for column, rule in zip(self._columns, self._rules, strict=True):
            column.quantise(column.due(rule))


def check_residual(group: int, residual: int) -> None:
    """ValueError unless keys are quantised in whole groups whenever the residual is full."""
    whole_number("group", group, 1)
    whole_number("residual", residual, 0)
    if residual % group:
        raise ConfigError(
            "residual", residual, why=f"must be 0 or a multiple of group={group}: keys are quantised in whole groups"
        )


@dataclass(frozen=True)
class Kivi(QuantisedStore):
    """Keys in groups of `group` tokens per channel, values in groups of min(group, D) channels per token.

        hat(x) = Delta * round((x - m) / Delta) + m, m = min x, Delta = (max x - min x) / (2^bits - 1)

    Keys become codes `residual` tokens at a time, as soon as so many are there (with residual 0: `group` at a time), so
    that their tail cycles; of the values all but the newest `residual` do. Keys are those after rotation.

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

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return RuledStore(
            DenseStore(keys, values, statistics, width),
            Column(ChannelCodes(self.quantiser, self.group)),
            Column(TokenCodes(self.quantiser, value_group(self.group, values.shape[-1]), GROWTH)),
            (Whole(self.residual or self.group), Beyond(self.residual)),
        )
