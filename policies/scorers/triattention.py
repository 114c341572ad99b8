"""TriAttention: score keys by a model's mean queries, rotated to future positions.

Shapes: B batch, H_q query heads, H KV heads, G = H_q / H, T slots, D head dim, F = D / 2 frequencies, n offsets.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.references import widen
from kvbench.policies.checks import calibrated_file, check_choices, whole_number
from kvbench.policies.describe import FILE
from kvbench.policies.model_layer import Rotation
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer

FLOOR = 1e-6  # of the standard deviation
NAMES = ("q_mean_real", "q_mean_imag", "q_abs_mean")


def head_name(layer: int, head: int) -> str:
    """The name of a query head in a calibration file."""
    return f"layer{layer:02d}_head{head:02d}"


class Centres(NamedTuple):
    """Statistics of a layer's queries before rotation: E q and E|q| of each frequency, [H_q,F] complex and float32."""

    mean: Tensor
    size: Tensor


@dataclass(frozen=True)
class TriAttention(Scorer):
    """Keep the keys with the largest expected product with future queries, given each query head's mean query.

        p_(h,j,delta) = "Re" sum_f q_(h,f) e^(i omega_f (t + delta)) k_(j,f)^"*"
        S_(h,j) = 1 / n sum_delta p_(h,j,delta) + sum_f (a_(h,f) - |q_(h,f)|) |k_(j,f)|
        s_j = max_(h in "group") (S_(h,j) - mean_j S_(h,j)) / max("std"_j S_(h,j), 10^(-6))

    Two channels that are rotated together are one complex number of frequency omega_f. q_(h,f) = E q is the mean query
    of head h before rotation and a_(h,f) = E|q| its mean size, both measured once per model; k_j is the stored, rotated
    key; t tokens have been seen, and delta = 1, 2, 4, ..., horizon. Keys and queries include the model's RoPE scaling.
    The first sum is the product with the mean query; the second is larger if the direction of queries varies. Mean and
    standard deviation run over the tokens that may be evicted.

    stats: a file of query statistics, as published by the authors, or for your own model:
    `kvbench calibrate triattention model=... task=... -o stats.pt`. horizon: the largest offset, a power of
    two. aggregation: `mean` over the offsets, or `max`. recent: number of newest tokens that are always kept (128 in
    the authors' vLLM plugin).
    Source: arXiv 2604.04921 and its code (WeianMao/triattention, selection per_layer_perhead). The preset protects the
    prompt and evicts every 128 decoded tokens, as the code does.
    """

    needs = Needs(keys=True, model=True, layer=True, evictable=True)

    stats: str = field(default="", metadata={"decides": FILE})
    horizon: int = 65536
    aggregation: Literal["mean", "max"] = "mean"
    recent: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        whole_number("recent", self.recent, 0)
        whole_number("horizon", self.horizon, 1)
        if self.horizon & (self.horizon - 1):
            raise ConfigError("horizon", self.horizon, "a power of two, such as 65536")
        calibrated_file("stats", self.stats, "a file of query statistics", "triattention")
        _ = self._file  # read at construction: the file may change later

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.recent)

    def score(self, observation: Observation, state: State) -> Tensor:
        evictable = observation.occupied if observation.evictable is None else observation.evictable
        return _standardised(self.products(observation), evictable).amax(2)

    def products(self, observation: Observation) -> Tensor:
        """S_(h,j): the expected product of each query head with each key, [B,H,G,T]."""
        keys = widen(observation.keys)
        heads, dim = keys.shape[1], keys.shape[-1]
        offsets = 2 ** torch.arange(self.horizon.bit_length(), device=keys.device)
        rotation = observation.model.rotation((observation.seen[:, None] + offsets)[:, None])  # at t + delta, [B,1,n]
        self._check_rotation(rotation, dim)
        mean, size = self._centres(observation.layer, observation.queries.shape[1], dim)
        queries = _channels(mean, rotation.interleaved).to(keys)  # [H_q,D]
        expected = rotation.apply(queries[None, :, None].expand(-1, -1, len(offsets), -1))  # [B,H_q,n,D]
        if self.aggregation == "mean":
            expected = expected.mean(2, keepdim=True)
        products: Tensor = expected.unflatten(1, (heads, -1)) @ keys.mT[:, :, None]  # [B,H,G,n or 1,T]
        scaling = torch.hypot(widen(rotation.cos[:, :, :1]), widen(rotation.sin[:, :, :1]))  # the model's, [B,1,1,F]
        sizes = _complex(keys, rotation.interleaved).abs() * scaling.to(keys)  # [B,H,T,F]
        rest = (size - mean.abs()).to(keys).unflatten(0, (heads, -1)) @ sizes.mT  # [B,H,G,T]
        scores: Tensor = products.amax(3) + rest
        return scores

    # --- the file --------------------------------------------------------------------------------------------------
    @cached_property
    def _file(self) -> dict[str, Any]:
        if not Path(self.stats).is_file():
            raise ConfigError("stats", self.stats, why="is not a file")
        try:
            found = torch.load(self.stats, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise ConfigError("stats", self.stats, why="must be a file of tensors saved by torch.save") from error
        stats = found.get("stats") if isinstance(found, Mapping) else None
        if not isinstance(stats, Mapping) or not all(set(NAMES) <= set(head) for head in stats.values()):
            raise ConfigError("stats", self.stats, why=f"must contain `stats` with {', '.join(NAMES)} of every head")
        return dict(found)

    def _centres(self, layer: int, query_heads: int, dim: int) -> Centres:
        """The statistics of a layer's query heads. ConfigError if the file belongs to another model."""
        stats, names = self._file["stats"], [head_name(layer, head) for head in range(query_heads)]
        missing = [name for name in names if name not in stats]
        if missing or head_name(layer, query_heads) in stats:
            have = f"has no {missing[0]}" if missing else f"has more than {query_heads} query heads in layer {layer}"
            raise ConfigError("stats", self.stats, why=f"does not match the model: it {have}")
        real, imaginary, size = (torch.stack([stats[head][name].float() for head in names]) for name in NAMES)
        if real.shape[-1] != dim // 2:
            why = f"does not match the model: it has heads of {2 * real.shape[-1]}, layer {layer} has heads of {dim}"
            raise ConfigError("stats", self.stats, why=why)
        return Centres(torch.complex(real, imaginary), size)

    def _check_rotation(self, rotation: Rotation, dim: int) -> None:
        """Raise ValueError unless all channels of a head are rotated, in the pairs that the file is about."""
        rotated = 2 * rotation.cos.shape[-1]
        if rotated != dim:
            raise ValueError(
                f"triattention scores keys by their rotation, but this layer rotates {rotated} of {dim} channels of a "
                "head: use another policy, such as rkv"
            )
        style, own = self._file.get("metadata", {}).get("rope_style"), rope_style(rotation)
        if style is not None and style != own:
            why = f"does not match the model: it pairs channels in style {style!r}, the model in style {own!r}"
            raise ConfigError("stats", self.stats, why=why)


def rope_style(rotation: Rotation) -> str:
    """Which channels are rotated together, in the words of calibration files."""
    return "interleaved" if rotation.interleaved else "half"


def _complex(x: Tensor, interleaved: bool) -> Tensor:
    """Vectors [...,D] as complex numbers of each frequency, [...,F]."""
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.complex(a, b)


def _channels(x: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `_complex`."""
    return torch.stack([x.real, x.imag], dim=-1).flatten(-2) if interleaved else torch.cat([x.real, x.imag], dim=-1)


def _standardised(raw: Tensor, among: Tensor) -> Tensor:
    """Scores [B,H,G,T] of each query head minus their mean, divided by their standard deviation (biased).

    among, bool [B,H,T]: the tokens over which mean and deviation are computed.
    """
    counted = among[:, :, None]
    count = counted.sum(-1, keepdim=True).clamp(min=1)
    mean = raw.where(counted, 0).sum(-1, keepdim=True) / count
    variance = (raw - mean).square().where(counted, 0).sum(-1, keepdim=True) / count
    return (raw - mean) / variance.sqrt().clamp(min=FLOOR)
