"""Inputs for attention on packed codes, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.quantized import Outliers, Packed, Side
from kvbench.kernels.references import Attention


@dataclass(frozen=True)
class Case:
    """One call: keys and values in codes up to a token, then a tail."""

    batch: int = 1
    heads: int = 1
    group: int = 4  # query heads of a KV head
    dim: int = 64
    value_dim: int = 64
    keys: int = 256  # tokens in codes
    values: int = 256
    tokens: int = 270
    bits: int = 2
    unit: int = 128  # tokens of a key group
    value_unit: int = 64  # channels of a value group; 0: values per channel, as the keys
    outliers: int = 0
    softcap: float | None = None
    metadata: torch.dtype = torch.float16
    dtype: torch.dtype = torch.float32
    padded: bool = False  # the last sequence asks nothing

    def draw(self, seed: int, device: str = "cpu") -> dict[str, Any]:
        """Arguments by name: tails are strided views, codes parts of a larger tensor, as a queue hands them over."""
        random = torch.Generator().manual_seed(seed)
        outliers = None
        if self.outliers:
            slots = torch.stack(
                [torch.randperm(min(self.keys, self.values), generator=random)[: self.outliers]
                 for _ in range(self.batch * self.heads)]
            ).view(self.batch, self.heads, -1)  # fmt: skip
            slots[..., self.outliers // 2] = -1
            outliers = Outliers(
                *(self._tokens(self.outliers, dim, random, device) for dim in (self.dim, self.value_dim)),
                slots.to(device, torch.int32),
            )
        queries = 2 * torch.randn(self.batch, 1, self.heads * self.group, self.dim, generator=random)
        positions = torch.full((self.batch, 1), self.tokens)
        positions[-1] = -1 if self.padded else self.tokens
        sides = (
            (self.keys, self.dim, self.unit, False),
            (self.values, self.value_dim, self.value_unit or self.unit, self.value_unit > 0),
        )
        keys, values = (self._side(*side, random, device) for side in sides)
        return {
            "queries": queries.transpose(1, 2).to(device, self.dtype),
            "query_positions": positions.to(device),
            "keys": keys,
            "values": values,
            "scaling": 1.3 * self.dim**-0.5,
            "softcap": self.softcap,
            "outliers": outliers,
        }

    def _side(self, coded: int, dim: int, unit: int, per_token: bool, random: torch.Generator, device: str) -> Side:
        entries, groups = (coded, dim // unit) if per_token else (coded // unit, dim)
        shape = (self.batch, self.heads, entries + 3, groups)
        words = torch.randint(-(2**31), 2**31, (*shape, -(-unit * self.bits // 32)), generator=random)
        scale = torch.rand(shape, generator=random).mul(3 / 2**self.bits).to(device, self.metadata)
        minimum = torch.randn(shape, generator=random).to(device, self.metadata)
        words, scale, minimum = (x[:, :, 2 : 2 + entries] for x in (words.to(device, torch.int32), scale, minimum))
        return Side(
            Packed(words, scale, minimum, self.bits, unit, per_token),
            self._tokens(self.tokens - coded, dim, random, device),
        )

    def _tokens(self, count: int, dim: int, random: torch.Generator, device: str) -> Tensor:
        store = torch.randn(self.batch, self.heads, count + 4, dim + 3, generator=random).to(device, self.dtype)
        return store[:, :, 3 : 3 + count, 1 : 1 + dim]


ATTENTION = {
    "one-scale-per-value": Case(batch=2, heads=2, keys=128, values=128, tokens=140),
    "values-behind-keys-as-in-kivi": Case(keys=384, values=150, tokens=390, group=1),
    "outliers": Case(outliers=9, group=3),
    "outliers-and-softcap-4-bits": Case(bits=4, unit=64, outliers=5, softcap=3.0, group=8),
    "8-bits-odd-head": Case(bits=8, unit=32, dim=80, value_dim=80, value_unit=80, keys=96, values=96, tokens=100),
    "keys-wider-than-values": Case(dim=96, value_dim=48, value_unit=48, group=5),
    "112-channels-float32-scales": Case(dim=112, value_dim=112, value_unit=112, metadata=torch.float32),
    "small-groups": Case(unit=32, value_unit=16, group=7, keys=64, values=64, tokens=67, outliers=3),
    "groups-that-end-inside-a-word": Case(unit=10, value_unit=8, keys=30, values=27, tokens=35, dim=24, value_dim=24),
    "values-per-channel-as-in-kcvc": Case(unit=24, value_unit=0, bits=4, keys=72, values=72, tokens=75),
    "a-sequence-that-asks-nothing": Case(batch=2, padded=True, keys=128, values=128, tokens=140, outliers=4),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16-tail-only-in-values": Case(dtype=torch.float16, keys=128, values=3, tokens=128),
    "widest-head": Case(dim=256, value_dim=256, value_unit=256, group=2, keys=128, values=128, tokens=129),
    "widest-head-outliers": Case(
        dim=256, value_dim=256, value_unit=256, group=2, keys=256, values=256, tokens=257, outliers=7
    ),
}


def quantised_attention_ref(
    queries: Tensor, query_positions: Tensor, keys: Side, values: Side, scaling: float, softcap: float | None = None,
    outliers: Outliers | None = None,
) -> Attention:  # fmt: skip
    """The definition: dequantise, put the outliers in their places, attend in float32."""
    k, v = keys.after(0), values.after(0)
    if outliers is not None:
        for b, h, e in (outliers.slots >= 0).nonzero().tolist():
            slot = outliers.slots[b, h, e]
            k[b, h, slot], v[b, h, slot] = outliers.keys[b, h, e].float(), outliers.values[b, h, e].float()
    batch, query_heads, new, dim = queries.shape
    rows = queries.float().reshape(batch, k.shape[1], -1, dim)
    logits = rows @ k.transpose(-1, -2) * scaling
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill((query_positions < 0)[:, None, None], -torch.inf)
    log_sum_exp = logits.logsumexp(-1)
    out = (logits - log_sum_exp[..., None]).exp().nan_to_num(0.0) @ v
    return Attention(out.view(batch, query_heads, new, -1).to(queries.dtype), log_sum_exp.view(batch, query_heads, new))
