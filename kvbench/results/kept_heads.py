"""The number of heads that keep each token of a prompt, run-length encoded for samples.jsonl.

`kept_heads` is a list of pairs `[heads, tokens]`: the first `tokens` tokens of the prompt are held by `heads` of all KV
heads of all layers (at most L * H_kv), and so on up to the prompt's last token. It is counted after the last generated
token, like `kept_tokens`, and does not include tokens of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

KeptHeads = list[list[int]]


def kept_heads(positions: Iterable[Tensor], prompt_tokens: int) -> KeptHeads:
    """The pairs of one sequence. positions: [H_kv, C] for every layer, the position in each slot, -1 if it is empty."""
    held = torch.cat([layer.flatten().to("cpu", torch.int64) for layer in positions])
    kept = torch.bincount(held + 1, minlength=prompt_tokens + 1)[1 : prompt_tokens + 1]
    return torch.stack(kept.unique_consecutive(return_counts=True), dim=1).tolist()


def counts(pairs: Sequence[Sequence[int]]) -> list[int]:
    """The number of heads that keep each token of the prompt."""
    return [heads for heads, tokens in pairs for _ in range(tokens)]
