"""TurboQuant: every vector rotated at random, then coded number by number with one codebook, a token at a time.

Shapes: B batch, H KV heads, r query rows per KV head, N tokens, D head dim, W bytes of a vector's codes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.kernels.code_formats import Format
from kvbench.kernels.references import widen
from kvbench.policies.checks import choice, whole_number
from kvbench.policies.constants import on_host
from kvbench.policies.stores.codec import Codec
from kvbench.policies.stores.per_token import WHOLE
from kvbench.policies.stores.quantiser import from_bytes, look_up, to_bytes

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
class TurboQuant(Codec):
    """A vector's norm in 16 bits, and its direction, rotated at random, in `bits` per number: no groups, no residual.

        hat(x) = ||x|| R^T c, c_i = "the level nearest to" (R x)_i / ||x||, R = "a random rotation"

    Rotated, the D numbers of any unit vector are nearly N(0, 1/D): the levels are those of Lloyd and Max for it, in all
    layers and for all models. A vector takes D bits / 8 + 2 bytes. Rotation and levels are constants: they are drawn,
    or computed, from nothing but D, `bits` and `seed`, and are not counted. Queries are rotated, not keys back.

    With a sketch, keys are coded in one bit fewer; of what is left, e, are held a norm in 16 bits and the signs of
    D Gaussian projections, S: inner products with queries are then unbiased, and vary more.

        hat(x) = ||x|| R^T (c + sqrt(pi / 2) / D * ||e|| S^T "sign"(S e)), e = R x / ||x|| - c

    bits: per number, 1 to 8. sketch: of the keys; 2 bytes more. seed: of R and S.
    Source: Zandieh et al. 2025, arXiv 2504.19874, algorithms 1 and 2; its codebook for outlier channels (2.5 and 3.5
    bits) is left out.
    """

    slug_letters: ClassVar[Mapping[str, str]] = {"b": "bits"}

    bits: int = 4
    sketch: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        choice("sketch", self.sketch, True, False)
        whole_number("bits", self.bits, 2 if self.sketch else 1, 8)
        whole_number("seed", self.seed, 0)

    kinds: ClassVar[Mapping[str, str]] = {"codes": "codes", "signs": "codes", "norm": "norms", "left": "norms"}

    def _bits(self, side: int) -> int:
        return self.bits - (self.sketch and side == 0)

    def _constants(self, side: int, like: Tensor) -> tuple[Tensor, ...]:
        return constants(like.shape[-1], self._bits(side), self.seed, widen(like.new_empty(0)).dtype, like.device)

    def rotation(self, like: Tensor) -> Tensor:
        return self._constants(0, like)[0].mT

    def format(self, side: int) -> Format | None:
        return None if self.sketch else Format("table", self.bits, WHOLE)

    def table(self, side: int, dim: int, device: torch.device) -> Tensor:
        return constants(dim, self._bits(side), self.seed, torch.float32, device)[2]

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        rotation, gaussian, own_levels, bounds = self._constants(side, x)
        x = widen(x)
        norm = x.norm(dim=-1)
        held = norm.to(torch.float16)
        if not (held.is_meta or (held.shape[2] == 1 and not on_host(held)) or bool(held.isfinite().all())):
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
