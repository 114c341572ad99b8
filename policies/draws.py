"""Random numbers that belong to a token: a hash, not a generator's next number."""

import torch
from torch import Tensor

MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407  # Knuth's 64-bit linear congruential step


def uniform_draws(seed: int, layer: int, positions: Tensor) -> Tensor:
    """A uniform draw in [0,1) for each (seed, layer, KV head, position): positions [B,H_kv,T] -> [B,H_kv,T] float32.

    A token keeps its draw: it depends neither on the batch nor on how the prompt was split.
    """
    heads = torch.arange(positions.shape[1], device=positions.device)[None, :, None]
    mixed = positions.long() + 1
    for salt in (seed, layer, heads):
        mixed = (mixed + salt) * MULTIPLIER + INCREMENT  # int64 wraps around, as intended
        mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    return ((mixed >> 24) & 0xFFFFFF).float() / 2**24
