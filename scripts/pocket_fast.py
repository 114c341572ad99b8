"""The larger pocket model's training step: a lean forward pass of a Llama, its loss where any of a set is right, Muon.

The forward pass computes what `LlamaForCausalLM` does, from its own parameters (a test compares them). Everything but
attention works on all tokens of a batch as one list, so that one compiled graph serves every length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

log = logging.getLogger("train_pocket")
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024, Muon


def before_attention(
    x: Tensor,
    norm: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, heads, d] of the residual stream x [N, H]; the key heads are repeated."""
    d = cos.shape[-1]
    h = F.rms_norm(x, (x.shape[-1],), norm, eps).to(dtype)
    q, k, v = ((h @ w.to(dtype).T).unflatten(-1, (-1, d)) for w in (wq, wk, wv))
    q, k = (_rotated(part, cos, sin) for part in (q, k))
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _rotated(part: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = part.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (part.float() * cos[:, None] + turned * sin[:, None]).to(part.dtype)


def after_attention(
    x: Tensor, y: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """The residual stream [N, H] after a layer whose attention gave y [N, heads * d]."""
    x = x + (y @ wo.to(y.dtype).T).float()
    h = F.rms_norm(x, (x.shape[-1],), norm, eps).to(y.dtype)
    inner = F.silu(h @ gate.to(y.dtype).T) * (h @ up.to(y.dtype).T)
    return x + (inner @ down.to(y.dtype).T).float()


class Forward:
    """The hidden states of a batch. compiled: let torch.compile fuse what stands around attention."""

    def __init__(self, model: LlamaForCausalLM, dtype: torch.dtype, compiled: bool) -> None:
        self.model, self.dtype = model, dtype
        self.before: Callable[..., tuple[Tensor, Tensor, Tensor]] = before_attention
        self.after: Callable[..., Tensor] = after_attention
        if compiled:
            self.before = torch.compile(before_attention, dynamic=False)
            self.after = torch.compile(after_attention, dynamic=False)
        self._turns: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def turns(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every token of a batch, [rows * length, d] each."""
        if (rows, length) not in self._turns:
            place = torch.arange(length, device=self.model.device)
            with torch.no_grad():
                cos, sin = self.model.model.rotary_emb(torch.zeros(1, device=self.model.device), place[None])
            self._turns[rows, length] = (cos[0].repeat(rows, 1), sin[0].repeat(rows, 1))
        return self._turns[rows, length]

    def __call__(self, ids: Tensor) -> Tensor:
        """Hidden states before the head, [B * T, H], of ids [B, T]."""
        rows, length = ids.shape
        body, eps = self.model.model, self.model.config.rms_norm_eps
        cos, sin = self.turns(rows, length)
        x = F.embedding(ids.reshape(-1), body.embed_tokens.weight)
        for layer in body.layers:
            a, m = layer.self_attn, layer.mlp
            projections = (a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)
            qkv = self.before(x, layer.input_layernorm.weight, *projections, cos, sin, eps, self.dtype)
            q, k, v = (part.view(rows, length, -1, cos.shape[-1]).transpose(1, 2) for part in qkv)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows * length, -1)
            inside = (m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight)
            x = self.after(x, y, a.o_proj.weight, layer.post_attention_layernorm.weight, *inside, eps)
        return F.rms_norm(x, (x.shape[-1],), body.norm.weight, eps)


@dataclass(frozen=True)
class Targets:
    """`pocket_families.Packed` on the device: what is to be known, and where several ids are right."""

    place: Tensor  # [M]
    target: Tensor
    weight: Tensor
    family: Tensor
    option_of: Tensor
    option: Tensor


def loss_of(hidden: Tensor, head: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """(weighted mean of -log of the probability of all that is right, which targets were met [M] as 0 or 1)."""
    logits = (hidden[targets.place] @ head.to(hidden.dtype).T).float()
    logp = logits.log_softmax(-1)
    index = torch.arange(len(logp), device=logp.device)
    exact = logp[index, targets.target]
    summed = torch.zeros_like(exact).index_add(0, targets.option_of, logp[targets.option_of, targets.option].exp())
    several = summed > 0
    loss = -torch.where(several, (summed + 1e-20).log(), exact)
    with torch.no_grad():
        best = logits.argmax(-1)
        met = (best == targets.target).float()
        also = (best[targets.option_of] == targets.option).float()
        met = met.index_add(0, targets.option_of, also).clamp(max=1)
    return (loss * targets.weight).sum() / targets.weight.sum(), met


def orthogonal(matrices: Tensor) -> Tensor:
    """Of every matrix in [K, rows, columns] the nearest with singular values near 1, by five Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon:
    """Momentum made orthogonal, for the matrices of the layers; equal shapes are updated together.

    The update is scaled to a root mean square of 0.2, that of AdamW, so that both may share a learning rate (Liu et
    al. 2025, arXiv 2502.16982, eq. 4).
    """

    def __init__(self, parameters: list[Tensor], momentum: float = 0.95, weight_decay: float = 0.02) -> None:
        shapes = sorted({tuple(p.shape) for p in parameters})
        self.groups = [[p for p in parameters if tuple(p.shape) == shape] for shape in shapes]
        self.buffers = [torch.zeros_like(torch.stack(list(group))) for group in self.groups]
        self.momentum, self.weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update from the gradients."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grads = torch.stack([p.grad for p in group])  # type: ignore[misc]
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonal(grads.lerp(buffer, self.momentum))
            update *= -rate * 0.2 * max(update.shape[1:]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind(0)))


@torch.no_grad()
def tame(parameters: list[Tensor], most: float = 1.0) -> Tensor:
    """Clip the gradients together to this norm; where any is not a number, make all of them zero. The norm before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack(torch._foreach_norm(grads)).norm()
    good = norm.isfinite()
    for grad in grads:
        grad.nan_to_num_(0.0, 0.0, 0.0)
    torch._foreach_mul_(grads, torch.where(good, (most / (norm + 1e-6)).clamp(max=1.0), torch.zeros_like(norm)))
    return norm
