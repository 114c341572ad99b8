"""KIVI: keys quantised per channel, values per token, the newest tokens in full precision. KCVC: both per channel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.group_formats import Form
from kvbench.policies.checks import whole_number
from kvbench.policies.stores.codec import Codec
from kvbench.policies.stores.quantiser import Quantiser


@dataclass(frozen=True)
class GroupCodec(Quantiser, Codec):
    """bits: 2, 4 or 8 per number. metadata: dtype of scales and minima (auto: float16 for 16-bit models, else the
    model's own). fp16_arith: quantise in the model's own dtype, as KIVI's code does, instead of float32.
    """

    grouped = True
    kinds: ClassVar[Mapping[str, str]] = {"words": "codes"}


def value_group(group: int, dim: int) -> int:
    """Channels of a value that share a scale: min(group, D). ConfigError if that does not divide the head dimension."""
    channels = min(group, dim)
    if dim % channels:
        why = f"does not divide the head dimension {dim} of the values; choose a divisor or {dim} and more"
        raise ConfigError("group", group, why=why)
    return channels


def check_residual(group: int, residual: int) -> None:
    """ValueError unless keys are quantised in whole groups whenever the residual is full."""
    whole_number("group", group, 1)
    whole_number("residual", residual, 0)
    if residual % group:
        raise ConfigError(
            "residual", residual, why=f"must be 0 or a multiple of group={group}: keys are quantised in whole groups"
        )


class KiviCodes(GroupCodec):
    """Keys in groups of `group` tokens per channel, values in groups of min(group, D) channels per token."""

    group: int

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        return self.coded(x, side, x.dtype)

    def coded(self, x: Tensor, side: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Codes of tokens x of a model in `dtype`."""
        if side == 0:
            return self.by_channel(x, self.group, dtype)
        return self.by_token(x, value_group(self.group, x.shape[-1]), dtype)

    def decode(self, codes: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        if side == 0:
            return self.of_channels(codes, self.group)
        return self.of_tokens(codes, value_group(self.group, dim))

    def check_shape(self, heads: int, dim: int) -> None:
        value_group(self.group, dim)

    def packed(self, side: int, dim: int) -> Form:
        return Form(self.bits, value_group(self.group, dim) if side else self.group, side == 1, dim)


@dataclass(frozen=True)
class Kivi(KiviCodes):
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

    def due(self, side: int, exact: int) -> int:
        size = self.residual or self.group
        return exact // size * size if side == 0 else max(exact - self.residual, 0)

    @property
    def most_exact(self) -> int:
        return self.residual + 1 if self.residual else self.group

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        return self.residual > 0 and not self.fp16_arith


@dataclass(frozen=True)
class Kcvc(GroupCodec):
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

    def due(self, side: int, exact: int) -> int:
        size = self.residual or self.group or 1
        return exact // size * size

    @property
    def most_exact(self) -> int:
        return 0 if self.group is None else self.residual or self.group

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        return self.by_channel(x, self.group or x.shape[2], x.dtype)

    def decode(self, codes: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        return self.of_channels(codes, self.group or tokens)

    def packed(self, side: int, dim: int) -> Form | None:
        return None if self.group is None else Form(self.bits, self.group, False, dim)
