"""Stores of serving engines (vLLM, TensorRT-LLM, SGLang): every key and value has its own codes of 8 or 4 bits.

Shapes: B batch, H KV heads, n tokens, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.code_formats import Format
from kvbench.kernels.references import widen
from kvbench.policies.checks import choice, number, whole_number
from kvbench.policies.stores.codec import TokenCodec
from kvbench.policies.stores.quantiser import from_bytes, look_up, to_bytes

WHOLE = 2**30  # a group of all numbers
FP8_MAX = 448.0  # the largest number of e4m3
E2M1_MAX = 6.0
SMALLEST_SCALE = 1e-6
SIGN_SEED = 0x9E3779B9
ZERO_BITS = 15  # the four lowest bits of an int4 scale hold its zero point


def to_e4m3(x: Tensor) -> Tensor:
    """Float32 numbers as bytes of e4m3, uint8: to the nearest, ties to even, saturating at 448."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: Tensor) -> Tensor:
    """Bytes of e4m3 as float32."""
    # The bits of a float16 that is 256 times as small: ten times as fast as torch's conversion on a CPU.
    bits = (codes.view(torch.int8).to(torch.int16) << 7) & ~0x4000
    return bits.view(torch.float16).float().mul_(256.0)


def to_e2m1(x: Tensor) -> Tensor:
    """Float32 numbers as codes of e2m1, uint8 0 to 15 with the sign in bit 3: to the nearest, ties to the even code."""
    bounds, _ = _e2m1_tables(x.device)
    return torch.bucketize(x.abs(), bounds).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def from_e2m1(codes: Tensor) -> Tensor:
    """Codes of e2m1 as float32."""
    return _e2m1_tables(codes.device)[1][codes.int()]


@lru_cache
def _e2m1_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The bounds between magnitudes, and the 16 numbers. A tie above an odd code belongs to the next, even one."""
    with torch.inference_mode(False):  # an inference tensor could not be used outside of inference mode
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, E2M1_MAX])
        bounds = (magnitudes[1:] + magnitudes[:-1]) / 2
        bounds[1::2] = torch.nextafter(bounds[1::2], torch.tensor(0.0))
        return bounds.to(device), torch.cat([magnitudes, -magnitudes]).to(device)


@lru_cache(maxsize=64)
def hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs times the orthonormal Hadamard matrix: [D,D], D a power of two."""
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < dim:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        draws = torch.Generator().manual_seed(SIGN_SEED)
        signs = 2 * torch.bernoulli(torch.full((dim,), 0.5), generator=draws).double() - 1
        rotation: Tensor = (signs[:, None] * matrix / dim**0.5).to(device, dtype)
        return rotation


def half_away(x: Tensor) -> Tensor:
    """Round to the nearest whole number, halves away from zero."""
    whole = x.trunc()
    return whole + ((x - whole).abs() >= 0.5) * x.sign()


@dataclass(frozen=True)
class LayerScaled(TokenCodec):
    """key_scales, value_scales: one number for each layer, as calibrated for a model; none: 1."""

    largest: ClassVar[float]
    """The largest number that codes can hold at a scale of 1."""

    key_scales: Sequence[float] = ()
    value_scales: Sequence[float] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("key_scales", "value_scales"):
            for scale in getattr(self, name):
                number(name, scale, 1e-30, 1e30)

    def check_layers(self, layers: int) -> None:
        for name in ("key_scales", "value_scales"):
            given = getattr(self, name)
            if given and len(given) != layers:
                raise ConfigError(name, given, why=f"must be empty or hold {layers} numbers, one for each layer")

    def for_layer(self, index: int) -> Self:
        keys, values = (tuple(given[index : index + 1]) for given in (self.key_scales, self.value_scales))
        return replace(self, key_scales=keys, value_scales=values)

    def scale(self, side: int) -> float:
        return (*(self.value_scales if side else self.key_scales), 1.0)[0]

    def limit(self, side: int) -> float:
        return self.largest * self.scale(side)


@dataclass(frozen=True)
class Fp8(LayerScaled):
    """Every number in 8 bits, e4m3, with one scale for the keys and one for the values of a layer: 2D bytes per token.

        hat(x) = s e4m3(x / s), to the nearest, ties to even, saturating at 448

    key_scales, value_scales: s of each layer, the largest number over some texts / 448; none: 1, vLLM's default.
    Source: vLLM's kv_cache_dtype=fp8 (vllm/config/cache.py), TensorRT-LLM's KvCacheConfig(dtype="fp8"), SGLang's
    --kv-cache-dtype fp8_e4m3.
    """

    largest = FP8_MAX

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        return {"codes": to_e4m3(x.float() / self.scale(side))}

    def decode(self, held: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        return from_e4m3(held["codes"]) * self.scale(side)

    def format(self, side: int) -> Format:
        return Format("e4m3", 8)


@dataclass(frozen=True)
class Fp8PerTokenHead(TokenCodec):
    """Every number in 8 bits, e4m3, with a float32 scale for each key and value: 2D + 8 bytes per token and KV head.

        hat(x) = s e4m3(x / s), s = max(max |x| / 448, 1e-6)

    Source: vLLM's kv_cache_dtype=fp8_per_token_head (triton_quant_kv).
    """

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        x = x.float()
        own = (x.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=SMALLEST_SCALE)
        return {"codes": to_e4m3(x * (1 / own)), "scale": own}

    def decode(self, held: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        return from_e4m3(held["codes"]) * held["scale"]

    def format(self, side: int) -> Format:
        return Format("e4m3", 8, WHOLE, SMALLEST_SCALE, FP8_MAX)


@dataclass(frozen=True)
class Int8(TokenCodec):
    """Every number in 8 bits with a float32 scale for each key and value: 2D + 8 bytes per token and KV head.

        hat(x) = s "round"(x / s), s = max(max |x| / 127, 1e-6), codes from -128 to 127

    official: truncate towards zero, as the kernel's conversion to int8 does; else to the nearest, ties to even.
    Source: vLLM's kv_cache_dtype=int8_per_token_head (triton_quant_kv).
    """

    official: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("official", self.official, True, False)

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        x = x.float()
        own = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=SMALLEST_SCALE)
        codes = (x * (1 / own)).clamp(-128, 127)
        return {"codes": (codes.trunc() if self.official else codes.round()).to(torch.int8), "scale": own}

    def decode(self, held: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        return held["codes"].float() * held["scale"]

    def format(self, side: int) -> Format:
        return Format("integer", 8, WHOLE, SMALLEST_SCALE, 127.0, self.official)


@dataclass(frozen=True)
class Int4(TokenCodec):
    """Every number in 4 bits with one scale and zero point for each key and value: D + 8 bytes per token and KV head.

        hat(x) = s (c - z), c = "round"(x / s + z), s = max((max x - min x) / 15, 1e-6), z = "round"(- min x / s)

    c and z are from 0 to 15 and rounded to the nearest, halves away from zero. z replaces the four lowest bits of the
    float32 scale. A vector of only positive, or only negative, numbers saturates.

    rotate: multiply keys, values and queries by random signs and a Hadamard matrix first, so D is a power of two; the
    output is rotated back. The signs are a constant and not counted.
    Source: vLLM's kv_cache_dtype=int4_per_token_head (triton_quant_kv).
    """

    rotate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("rotate", self.rotate, True, False)

    def check_shape(self, heads: int, dim: int) -> None:
        if dim % 2 or (self.rotate and dim & (dim - 1)):
            least = "a power of two (or rotate=false)" if self.rotate else "even"
            raise ValueError(f"int4 needs a head dimension that is {least}, this model has {dim}")

    def rotation(self, like: Tensor) -> Tensor | None:
        return hadamard(like.shape[-1], widen(like.new_empty(0)).dtype, like.device) if self.rotate else None

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        x = x.float()
        x = x @ hadamard(x.shape[-1], x.dtype, x.device) if self.rotate else x
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        own = ((high - low) / 15).clamp(min=SMALLEST_SCALE)
        zero = half_away(-low / own).clamp(0, 15)
        codes = half_away(x * (1 / own) + zero).clamp(0, 15).to(torch.uint8)
        held = (own.contiguous().view(torch.int32) & ~ZERO_BITS) | zero.int()
        return {"codes": to_bytes(codes, 4), "scale": held.view(torch.float32)}

    def decode(self, held: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        bits = held["scale"].contiguous().view(torch.int32)
        own, zero = (bits & ~ZERO_BITS).view(torch.float32), bits & ZERO_BITS
        return (from_bytes(held["codes"], 4, dim).float() - zero) * own

    def format(self, side: int) -> Format:
        return Format("zero point", 4, WHOLE, SMALLEST_SCALE, 15.0)


@dataclass(frozen=True)
class Nvfp4(LayerScaled):
    """Every number in 4 bits, e2m1, with an e4m3 scale for 16 channels: 9D/8 bytes per token and KV head.

        hat(x) = e2m1(x / (f s)) f s, f = e4m3(max |x in block| / (6 s))

    e2m1 holds 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign; to the nearest, ties to the even code, saturating. If f is 0, so
    is the block. A GPU's approximate reciprocals may turn ties.

    group: channels that share a scale; it divides D. four_over_six: scale each block by its largest number / 4
    if that has the smaller squared error (vLLM's nvfp4_4over6). key_scales, value_scales: s of each layer, the
    largest number over some texts / 2688; none: 1.
    Source: vLLM's kv_cache_dtype=nvfp4 (nvfp4_utils.cuh), TensorRT-LLM's KvCacheConfig(dtype="nvfp4").
    """

    largest = FP8_MAX * E2M1_MAX
    group: int = 16
    four_over_six: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("group", self.group, 2)
        choice("four_over_six", self.four_over_six, True, False)

    def check_shape(self, heads: int, dim: int) -> None:
        if self.group % 2 or dim % self.group:
            why = f"does not divide the head dimension {dim}; choose an even divisor"
            raise ConfigError("group", self.group, why=why)

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        scale, x = self.scale(side), x.float()
        blocks = x.unflatten(-1, (-1, self.group))
        most = blocks.abs().amax(-1)
        factors, codes = self._coded(blocks, most, E2M1_MAX, scale)
        if self.four_over_six:
            others, other_codes = self._coded(blocks, most, 4.0, scale)
            errors = (self._errors(blocks, f, c, scale) for f, c in ((others, other_codes), (factors, codes)))
            better = torch.lt(*errors)
            factors, codes = torch.where(better, others, factors), torch.where(better[..., None], other_codes, codes)
        return {"codes": to_bytes(codes.flatten(-2), 4), "factors": factors}

    def _coded(self, blocks: Tensor, most: Tensor, largest: float, scale: float) -> tuple[Tensor, Tensor]:
        """Factors [B,H,n,D/16] as bytes of e4m3 and codes [B,H,n,D/16,16]; `largest`: of a block, coded."""
        factors = to_e4m3(most / (largest * scale))
        step = (from_e4m3(factors) * scale)[..., None]
        return factors, to_e2m1((blocks / step.masked_fill(step == 0, 1)).masked_fill(step == 0, 0))

    def _errors(self, blocks: Tensor, factors: Tensor, codes: Tensor, scale: float) -> Tensor:
        """The squared error of each block, [B,H,n,D/16]."""
        return (from_e2m1(codes) * (from_e4m3(factors) * scale)[..., None] - blocks).square().sum(-1)

    def decode(self, held: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        steps = (from_e4m3(held["factors"].contiguous()) * self.scale(side))[..., None]
        x = look_up(held["codes"], 4, _e2m1_tables(held["codes"].device)[1], dim)
        decoded: Tensor = (x.unflatten(-1, (held["factors"].shape[-1], -1)) * steps).flatten(-2)
        return decoded

    def format(self, side: int) -> Format:
        return Format("e2m1", 4, self.group, levels=E2M1_MAX, encodes=not self.four_over_six)
