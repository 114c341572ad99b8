"""Bits that a long cache stores for each number of a further token."""

from dataclasses import replace

from kvbench.models.cache_shapes import CacheShape
from kvbench.policies.policy import Policy
from kvbench.tools.cache_bytes import predict


def limit_bits(policy: Policy, shape: CacheShape) -> float:
    """The growth between 2^16 and 2^17 tokens, without layers that are stored differently."""
    deep = replace(policy, store=policy.store.for_layer(shape.layers))
    short, long = (predict(deep, shape, 2**power) for power in (16, 17))
    return 8 * (long.nbytes - short.nbytes) / (long.numbers - short.numbers)
