"""By how many heads each token of a prompt is kept, as runs of equal counts: small enough for a line of samples.jsonl.

`kept_heads` is a list of pairs `[heads, tokens]`: the first `tokens` tokens of the prompt are held by `heads` of all KV
heads of all layers (at most L * H_kv), the next ones by as many as the next pair says, up to the prompt's last token.
Counted after the last generated token, as `kept_tokens` is; tokens of the answer are not among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

KeptHeads = list[list[int]]


def kept_heads(positions: Iterable[Tensor], prompt_tokens: int) -> KeptHeads:
    """The pairs of one sequence. positions: of every layer [H_kv, C], the original position of a slot, -1 = empty."""
    held = torch.cat([layer.flatten().to("cpu", torch.int64) for layer in positions])
    kept = torch.bincount(held + 1, minlength=prompt_tokens + 1)[1 : prompt_tokens + 1]
    return torch.stack(kept.unique_consecutive(return_counts=True), dim=1).tolist()


def counts(pairs: Sequence[Sequence[int]]) -> list[int]:
    """The number of heads that keep each token of the prompt."""
    return [heads for heads, tokens in pairs for _ in range(tokens)]
