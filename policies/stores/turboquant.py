"""TurboQuant: every vector rotated at random, then coded number by number with one codebook, a token at a time.

Shapes: B batch, H KV heads, r query rows per KV head, N tokens, D head dim, W bytes of a vector's codes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.kernels.code_formats import Format
from kvbench.kernels.references import widen
from kvbench.policies.checks import choice, number, whole_number
from kvbench.policies.constants import is_checked
from kvbench.policies.stores.codec import Codec, TokenCodec
from kvbench.policies.stores.per_token import WHOLE
from kvbench.policies.stores.quantiser import from_bytes, look_up, to_bytes
from kvbench.policies.stores.slot_store import SIDES

LLOYD_STEPS = 1000  # levels of up to 5 bits move by less than 1e-7 in the last of them


@lru_cache
def levels(bits: int) -> Tensor:
    """The 2^bits Lloyd-Max levels of N(0, 1), rising, float64: each is the mean of what is nearest to it."""
    share = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    found = math.sqrt(6) * torch.erfinv(2 * share - 1)  # a start near many levels: quantiles of N(0, 3)
    ends = torch.tensor([-math.inf]).double(), torch.tensor([math.inf]).double()
    for _ in range(LLOYD_STEPS):
        bounds = torch.cat([ends[0], (found[1:] + found[:-1]) / 2, ends[1]])
        density, below = torch.exp(-bounds.square() / 2) / math.sqrt(2 * math.pi), torch.special.ndtr(bounds)
        found = -density.diff() / below.diff()
    return found


@lru_cache
def matrices(dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random rotation [D,D], uniform over all (Haar), and a Gaussian matrix [D,D] for the sketch, float64."""
    draws = torch.randn(2, dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rotation, upper = torch.linalg.qr(draws[0])
    return rotation * upper.diagonal().sign(), draws[1]


@lru_cache(maxsize=64)
def constants(dim: int, bits: int, seed: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Rotation, sketch matrix, levels of N(0, 1/D) and the bounds between them, on a device."""
    with torch.inference_mode(False):  # else they could not be used outside of inference mode
        own = levels(bits) / math.sqrt(dim)
        return tuple(x.to(device, dtype) for x in (*matrices(dim, seed), own, (own[1:] + own[:-1]) / 2))


@dataclass(frozen=True)
class TurboQuant(TokenCodec):
    """A vector's norm in 16 bits, and its direction, rotated at random, in `bits` per number: no groups, no residual.

        hat(x) = ||x|| R^T c, c_i = "the level nearest to" (R x)_i / ||x||, R = "a random rotation"

    Rotated, the D numbers of any unit vector are nearly N(0, 1/D): the levels are those of Lloyd and Max for it, in all
    layers and for all models. A vector takes D bits / 8 + 2 bytes. Rotation and levels are constants: they are drawn,
    or computed, from nothing but D, `bits` and `seed`, and are not counted. Queries are rotated, not keys back.

    With a sketch, keys are coded in one bit fewer; of what is left, e, are held a norm in 16 bits and the signs of
    D Gaussian projections, S: inner products with queries are then unbiased, and vary more.

        hat(x) = ||x|| R^T (c + sqrt(pi / 2) / D * ||e|| S^T "sign"(S e)), e = R x / ||x|| - c

    With outliers, the channels of each KV head that are largest in the prompt, by their sum of squares, are a vector of
    their own, coded in one bit more and rotated apart from the others: 2 bytes more for its norm, and 2 D bytes per KV
    head for the order of the channels. No kernel for GPUs reads them, so that decoding steps are not recorded. The
    paper's 2.5 bits are 2, with outliers=0.25, which makes 2.25; 0.5 makes 2.5.

    bits: per number, 1 to 8. sketch: of the keys; 2 bytes more. seed: of R and S. outliers: share of the channels.
    Source: Zandieh et al. 2025, arXiv 2504.19874, algorithms 1 and 2, section 4.3 for outliers. How these are found is
    ours, after QJL (arXiv 2406.03482).
    """

    slug_letters: ClassVar[Mapping[str, str]] = {"b": "bits", "o": "outliers"}

    bits: int = 4
    sketch: bool = False
    seed: int = 0
    outliers: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("sketch", self.sketch, True, False)
        number("outliers", self.outliers, 0, below=1)
        whole_number("bits", self.bits, 2 if self.sketch else 1, 7 if self.outliers else 8)
        whole_number("seed", self.seed, 0)

    kinds: ClassVar[Mapping[str, str]] = {"codes": "codes", "signs": "codes", "norm": "norms", "left": "norms"}

    def check_shape(self, heads: int, dim: int) -> None:
        if self.outliers and not 0 < round(self.outliers * dim) < dim:
            raise ValueError(f"outliers={self.outliers} of {dim} channels leaves no outlier, or no other channel")

    def fitted(self, keys: Tensor, values: Tensor, occupied: Tensor) -> Codec:
        return Split.of(self, keys, values, occupied) if self.outliers else self

    def _bits(self, side: int) -> int:
        return self.bits - (self.sketch and side == 0)

    def _constants(self, side: int, like: Tensor) -> tuple[Tensor, ...]:
        return constants(like.shape[-1], self._bits(side), self.seed, widen(like.new_empty(0)).dtype, like.device)

    def rotation(self, like: Tensor) -> Tensor:
        return self._constants(0, like)[0].mT

    def format(self, side: int) -> Format | None:
        return None if self.sketch or self.outliers else Format("table", self.bits, WHOLE)

    def table(self, side: int, dim: int, device: torch.device) -> Tensor:
        return constants(dim, self._bits(side), self.seed, torch.float32, device)[2]

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        rotation, gaussian, own_levels, bounds = self._constants(side, x)
        x = widen(x)
        norm = x.norm(dim=-1)
        held = norm.to(torch.float16)
        if is_checked(held) and not bool(held.isfinite().all()):
            raise ValueError("norms of keys or values do not fit 16 bits (65504)")
        unit = x / norm.masked_fill(norm == 0, 1.0)[..., None] @ rotation.mT
        codes = torch.bucketize(unit, bounds)
        new = {"codes": to_bytes(codes.to(torch.uint8), self._bits(side)), "norm": held}
        if self.sketch and side == 0:
            left = unit - own_levels[codes]
            signs = (left @ gaussian.mT >= 0).to(torch.uint8)
            new |= {"signs": to_bytes(signs, 1), "left": left.norm(dim=-1).to(torch.float16)}
        return new

    def decode(self, held: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        _, gaussian, own_levels, _ = self._constants(side, held["norm"].new_empty(dim, dtype=torch.float32))
        found = look_up(held["codes"], self._bits(side), own_levels, dim)
        if "signs" in held:
            signs = from_bytes(held["signs"], 1, dim).to(found.dtype).mul_(2).sub_(1)
            found = found + (math.sqrt(math.pi / 2) / dim * held["left"].float())[..., None] * (signs @ gaussian)
        return found * held["norm"].float()[..., None]


@dataclass(frozen=True, eq=False)
class Channels:
    """The channels of keys or values: order [B,H,D] int16, outliers first, and their number."""

    order: Tensor
    outliers: int

    @classmethod
    def of(cls, x: Tensor, occupied: Tensor, share: float) -> "Channels":
        """The channels of x [B,H,n,D], of which `share` are outliers: those with the largest sums of squares."""
        squares = widen(x).masked_fill(~occupied[..., None], 0.0).square().sum(2)
        count, order = round(share * x.shape[-1]), squares.sort(dim=-1, descending=True, stable=True).indices
        both = order.split([count, order.shape[-1] - count], dim=-1)
        return cls(torch.cat([part.sort(-1).values for part in both], dim=-1).to(torch.int16), count)

    def index(self, tokens: int) -> Tensor:
        """The order as an index into [B,H,tokens,D]."""
        return self.order.long()[:, :, None].expand(-1, -1, tokens, -1)


@dataclass(frozen=True, eq=False)
class Split(Codec):
    """TurboQuant with outliers in one layer: two instances, for the outliers and for the other channels.

    sides: channels of keys and of values.
    """

    outliers: TurboQuant
    others: TurboQuant
    sides: tuple[Channels, Channels]

    kinds: ClassVar[Mapping[str, str]] = {
        **TurboQuant.kinds, **{f"outlier {name}": kind for name, kind in TurboQuant.kinds.items()}
    }  # fmt: skip

    @classmethod
    def of(cls, codec: TurboQuant, keys: Tensor, values: Tensor, occupied: Tensor) -> "Split":
        """The codec of a layer whose prompt has these keys and values [B,H,n,D] in the occupied slots."""
        sides = Channels.of(keys, occupied, codec.outliers), Channels.of(values, occupied, codec.outliers)
        others = replace(codec, outliers=0.0)
        return cls(replace(others, bits=codec.bits + 1, seed=codec.seed + 1), others, sides)

    @property
    def fitted_tensors(self) -> Mapping[str, Tensor]:
        return {f"{name} channels": side.order for name, side in zip(SIDES, self.sides, strict=True)}

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        channels = self.sides[side]
        ordered = widen(x).gather(-1, channels.index(x.shape[2]))
        first, rest = ordered[..., : channels.outliers], ordered[..., channels.outliers :]
        new = {f"outlier {name}": part for name, part in self.outliers.encode(first, side).items()}
        return new | self.others.encode(rest, side)

    def decode(self, held: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        channels = self.sides[side]
        first = {name.removeprefix("outlier "): x for name, x in held.items() if name.startswith("outlier ")}
        rest = {name: x for name, x in held.items() if not name.startswith("outlier ")}
        parts = (
            (self.outliers, self.outliers.decode(first, side, tokens, channels.outliers)),
            (self.others, self.others.decode(rest, side, tokens, dim - channels.outliers)),
        )
        x = torch.cat([part @ codec.rotation(part).mT for codec, part in parts], dim=-1)
        return torch.empty_like(x).scatter_(-1, channels.index(tokens), x)
