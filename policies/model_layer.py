"""Access to a layer of the model: its rotation and its output projection.

Shapes: B batch, H heads, H_q query heads, n tokens, D head dim, R rotated numbers of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.kernels.references import widen


@dataclass(frozen=True)
class Rotation:
    """A layer's rotary embedding at some positions; R = 0 for a layer without rotation.

    cos, sin [B,H,n,R/2], or shapes that broadcast: the values of the model, including its scaling. The first R channels
    of a head are rotated in pairs: i with i + R/2, or neighbours if `interleaved`.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """Rotate vectors [B,H,n,D] as the model does at these positions."""
        x = widen(x)
        if self.cos.shape[-1] == 0:
            return x
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        rotated, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
        a, b = (rotated[..., ::2], rotated[..., 1::2]) if self.interleaved else rotated.chunk(2, dim=-1)
        turned = a * cos - b * sin, b * cos + a * sin
        pairs = torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)
        return torch.cat([pairs, rest.expand(*pairs.shape[:-1], -1)], dim=-1)

    def inverse(self) -> "Rotation":
        """The inverse rotation, including the inverse scaling."""
        cos, sin = widen(self.cos), widen(self.sin)
        square = cos.square() + sin.square()
        return Rotation(cos / square, -sin / square, self.interleaved)

    def mean(self, dim: int) -> Tensor:
        """The mean of the rotations over the positions, as matrices [B,H,D,D] with D = `dim`."""
        cos, sin = (widen(x).mean(-2, keepdim=True) for x in (self.cos, self.sin))
        mean = Rotation(cos, sin, self.interleaved)
        identity = torch.eye(dim, dtype=mean.cos.dtype, device=mean.cos.device)
        return mean.apply(identity.expand(*mean.cos.shape[:2], dim, dim)).mT


class Latents(NamedTuple):
    """Expands stored latents to keys and values.

    expand: of latents [B,1,T,R] and rotated keys [B,1,T,D'], the keys [B,H_q,T,D] and values [B,H_q,T,V] of all heads.
    value_dim: V.
    """

    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    value_dim: int


class ModelLayer(Protocol):
    """A layer of the model. Methods raise ValueError for model families that do not support them."""

    def rotation(self, positions: Tensor) -> Rotation:
        """The rotation of queries and keys at positions [B,H,n] >= 0."""

    def key_bias(self) -> Tensor:
        """The bias of the key projection, before the rotation, [H_kv,D]."""

    def output_projection(self) -> Tensor:
        """The output projection by query heads, [H_q,D,hidden]: a head contributes its output times its projection."""
