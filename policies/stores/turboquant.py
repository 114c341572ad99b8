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

from kvbench.kernels.references import widen
from kvbench.policies.checks import choice, whole_number
from kvbench.policies.constants import on_host
from kvbench.policies.stores.codes import Codes
from kvbench.policies.stores.column import Column
from kvbench.policies.stores.packing import pack, unpack
from kvbench.policies.stores.quantised import ColumnStore, QuantisedLayerStore
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import GROWTH

LLOYD_STEPS = 1000  # levels of up to 5 bits move by less than 1e-7 in the last of them


@lru_cache
def levels(bits: int) -> Tensor:
    """The 2^bits Lloyd-Max levels of N(0, 1), rising, float64: each is the mean of what is nearest to it."""
    share = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    found = math.sqrt(6) * torch.erfinv(2 * share - 1)  # where many levels lie: quantiles of N(0, 3)
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


def planes_of(bits: int) -> list[int]:
    """The powers of two that add up to `bits`: codes of 3 bits are packed as two bits and one."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def to_bytes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [...,D] as bytes [...,W]: D * bits / 8 of them where 8 divides D."""
    parts = []
    for width in planes_of(bits):
        plane = codes & (2**width - 1)
        parts.append(pack(plane, width).view(torch.uint8)[..., : -(-codes.shape[-1] * width // 8)])
        codes = codes >> width if width < 8 else codes
    return torch.cat(parts, dim=-1)


def from_bytes(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The codes of `to_bytes`: bytes [...,W] -> uint8 [...,D]."""
    found, low = None, 0
    sizes = [-(-dim * width // 8) for width in planes_of(bits)]
    for width, part in zip(planes_of(bits), packed.split(sizes, dim=-1), strict=True):
        words = torch.nn.functional.pad(part, (0, -part.shape[-1] % 4)).contiguous().view(torch.int32)
        plane = unpack(words, width, dim) << low
        found, low = plane if found is None else found | plane, low + width
    assert found is not None
    return found


class RotatedCodes(Codes):
    """Vectors as norm [B,H,N] float16 times a rotated unit vector in codes [B,H,N,W].

    With a sketch also the norm of what is left (the residual), float16, and a sign of each of its D projections.
    """

    def __init__(self, dim: int, bits: int, sketch: bool, seed: int) -> None:
        super().__init__(GROWTH)
        self.dim, self.bits, self.sketch, self.seed = dim, bits, sketch, seed

    def _constants(self, like: Tensor) -> tuple[Tensor, ...]:
        return constants(self.dim, self.bits, self.seed, widen(like.new_empty(0)).dtype, like.device)

    def append(self, x: Tensor, dtype: torch.dtype, counts: Tensor | None = None) -> None:
        rotation, gaussian, own_levels, bounds = self._constants(x)
        x = widen(x)
        norm = x.norm(dim=-1)
        held = norm.to(torch.float16)
        check_norms(held)
        unit = x / norm.masked_fill(norm == 0, 1.0)[..., None] @ rotation.T
        codes = torch.bucketize(unit, bounds)
        new = {"codes": to_bytes(codes.to(torch.uint8), self.bits), "norm": held}
        if self.sketch:
            left = unit - own_levels[codes]
            signs = (left @ gaussian.T >= 0).to(torch.uint8)
            new |= {"signs": to_bytes(signs, 1), "left": left.norm(dim=-1).to(torch.float16)}
        self.queue.append(new, counts)

    def sizes(self) -> dict[str, int]:
        queue = self.queue
        norms = queue.nbytes("norm") + queue.nbytes("left")
        coded = queue.nbytes("codes") + queue.nbytes("signs")
        return {"codes": coded, "norms": norms, "positions": queue.lengths_nbytes}

    def _rotated(self, first: int, last: int, like: Tensor) -> Tensor:
        """Tokens as attention reads them, rotated: [B,H,n,D] in the dtype of `like`."""
        view = {name: self.queue.view(name)[:, :, first:last] for name in self._names}
        _, gaussian, own_levels, _ = self._constants(like)
        found = own_levels[from_bytes(view["codes"], self.bits, self.dim).int()]
        if self.sketch:
            signs = from_bytes(view["signs"], 1, self.dim).to(found.dtype).mul_(2).sub_(1)
            scale = math.sqrt(math.pi / 2) / self.dim * view["left"].to(found.dtype)
            found = found + scale[..., None] * (signs @ gaussian)
        return found * view["norm"].to(found.dtype)[..., None]

    @property
    def _names(self) -> tuple[str, ...]:
        return ("codes", "norm", "signs", "left") if self.sketch else ("codes", "norm")

    def dequantised(self) -> Tensor:
        like = self.queue.view("norm").new_empty(0, dtype=torch.float32)
        return self._rotated(0, self.queue.most, like) @ self._constants(like)[0]

    def logits(self, queries: Tensor) -> Tensor:
        rotated = queries @ self._constants(queries)[0].T
        parts = [rotated @ self._rotated(*block, queries).transpose(-1, -2) for block in self._pieces(queries)]
        return torch.cat(parts, dim=-1)

    def mix(self, weights: Tensor) -> Tensor:
        parts = (weights[..., slice(*block)] @ self._rotated(*block, weights) for block in self._pieces(weights))
        return torch.stack(list(parts)).sum(0) @ self._constants(weights)[0]

    def _pieces(self, rows: Tensor) -> list[tuple[int, int]]:
        return list(self._blocks(rows.shape[0] * rows.shape[1] * self.dim))


def check_norms(norms: Tensor) -> None:
    """ValueError for vectors without a norm in 16 bits.

    Not checked on a GPU while decoding, which would have to synchronise for every token.
    """
    if norms.is_meta or (norms.shape[2] == 1 and not on_host(norms)) or bool(norms.isfinite().all()):
        return
    raise ValueError("keys or values contain NaN or infinity, or their norms do not fit 16 bits (65504)")


class TurboQuantLayerStore(QuantisedLayerStore):
    """The prompt is exact until it is in and evicted, a later token for the step that it comes in."""

    def flush(self, prompt: bool) -> None:
        for column in self._columns:
            column.quantise(column.tail.counts_held)


@dataclass(frozen=True)
class TurboQuant(ColumnStore):
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

    def empty(self, dense: SlotStore, values: Tensor) -> QuantisedLayerStore:
        keys = RotatedCodes(dense.keys.shape[-1], self.bits - self.sketch, self.sketch, self.seed)
        coded = RotatedCodes(values.shape[-1], self.bits, False, self.seed)
        return TurboQuantLayerStore(self, dense, Column(keys), Column(coded))
