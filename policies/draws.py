"""Random numbers per token, computed as a hash of its position instead of by a generator."""

from functools import lru_cache

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's increment, as int64


def scramble(x: Tensor) -> Tensor:
    """A bijective hash of int64: every input bit flips about half of the output's bits.

    Source: SplitMix64's finaliser (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
    figure 16). Products wrap around, as intended; `>>` repeats the sign, hence the masks.
    """
    x = (x ^ ((x >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))


def combined_seed(*parts: int) -> int:
    """A seed for each tuple of seeds and indices, 0 to 2**53 - 1."""
    mixed = torch.zeros((), dtype=torch.int64)
    for part in parts:
        mixed = scramble(mixed + part + GOLDEN)
    return int(mixed) & (2**53 - 1)


def uniform_draws(seed: int, layer: int, positions: Tensor, occasion: Tensor | None = None) -> Tensor:
    """A uniform draw in [0,1) for each (seed, layer, KV head, position): positions [B,H_kv,T] -> [B,H_kv,T] float32.

    The draw of a token depends neither on the batch nor on how the prompt is split. occasion [B]: a number of each
    sequence; tokens have other draws for every number.
    """
    mixed = scramble(_streams(seed, layer, positions.shape[1], positions.device) + positions + GOLDEN)
    if occasion is not None:
        mixed = scramble(mixed + occasion.to(mixed)[:, None, None] + GOLDEN)
    return ((mixed >> 40) & (2**24 - 1)).float() / 2**24


@lru_cache(maxsize=1024)
def _streams(seed: int, layer: int, heads: int, device: torch.device) -> Tensor:
    """The hash state of each KV head, int64 [1,H_kv,1]."""
    mixed = torch.zeros(1, heads, 1, dtype=torch.int64, device=device)
    for part in (seed, layer, torch.arange(heads, device=device)[None, :, None]):
        mixed = scramble(mixed + part + GOLDEN)
    return mixed
