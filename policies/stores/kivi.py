"""KIVI: keys quantised per channel, values per token, the newest tokens in full precision. KCVC: both per channel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.policies.checks import whole_number
from kvbench.policies.stores.codes import ChannelCodes, Codes, TokenCodes
from kvbench.policies.stores.quantised import QuantisedStore, value_group
from kvbench.policies.stores.slots import GROWTH


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

    def codes(self, side: int, x: Tensor) -> Codes:
        return kivi_codes(self, self.group, side, x)


def kivi_codes(store: QuantisedStore, group: int, side: int, x: Tensor) -> Codes:
    """Codes of keys per channel, or of values per token, like x [1,H,n,D]."""
    if side == 0:
        return ChannelCodes(store.quantiser, group)
    return TokenCodes(store.quantiser, value_group(group, x.shape[-1]), GROWTH)


@dataclass(frozen=True)
class Kcvc(QuantisedStore):
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

    @property
    def one_chunk(self) -> bool:
        return self.group is not None

    def codes(self, side: int, x: Tensor) -> Codes:
        return ChannelCodes(self.quantiser, self.group or x.shape[2])
