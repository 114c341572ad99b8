"""Statistics of the attention from an observation window, and the rows of a question's queries.

Shapes: B batch, H_kv KV heads, G query heads per KV head, W queries of the window, T slots.
"""

from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels.query_sums import entropy, variance
from kvbench.kernels.references import visible, widen
from kvbench.policies.constants import on_device
from kvbench.policies.observation import Observation

StatsDtype = Literal["float32", "model"]


def window_rows(observation: Observation, window: int) -> Tensor:
    """Attention of the newest `window` queries rounded to the dtype of the keys: [B,H_kv,G,W,T]."""
    return observation.window_attention(window).to(observation.keys.dtype)


def window_length(observation: Observation, window: int) -> int:
    """Number of queries in the window, at most `window` and those of a lookahead."""
    own = observation.window
    return (observation.queries if own is None else own.newest(window)[0]).shape[2]


def window_mean(observation: Observation, window: int, stats_dtype: StatsDtype) -> Tensor:
    """Mean of each query head's attention over the newest `window` queries, [B,H_kv,G,T]; `model` rounds it first."""
    if stats_dtype == "model":
        return window_rows(observation, window).mean(-2)
    return observation.window_sums(window) / window_length(observation, window)


def attention_before(logits: Tensor, places: Tensor, observation: Observation, window: int) -> Tensor:
    """The softmax of logits [B,H_kv,...,W,T] over the tokens before the newest `window`, 0 elsewhere.

    places [B,W]: positions of the queries.
    """
    older = observation.occupied & ~observation.newest(window)
    seen = visible(places, observation.positions, observation.params.sliding_window) & older[:, :, None]  # [B,H_kv,W,T]
    seen = seen.view(*seen.shape[:2], *[1] * (logits.dim() - 4), *seen.shape[2:])
    return logits.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)


def question_rows(observation: Observation) -> tuple[Tensor, Tensor]:
    """Attention of the question's queries processed so far, [B,H_kv,G,W,T], and the valid rows, bool [B,W].

    W is the longest question of the batch; rows of other queries are 0.
    """
    longest = max(
        end - begin for begin, end in zip(observation.sequences.questions, observation.sequences.prompts, strict=True)
    )
    rows = observation.window_attention(longest)
    assert observation.window is not None, "stored for policies with needs.question"
    positions = observation.window.positions[:, -rows.shape[3] :]
    valid = positions >= on_device(observation.sequences.questions, positions.device)[:, None]
    return rows.masked_fill(~valid[:, None, None, :, None], 0), valid


def window_variance(observation: Observation, window: int, stats_dtype: StatsDtype) -> Tensor:
    """Unbiased variance of each query head's attention over the window, [B,H_kv,G,T]; `model` rounds it first."""
    return (
        variance(window_rows(observation, window))
        if stats_dtype == "model"
        else observation.window_spread("variance", window)
    )


def window_entropy(observation: Observation, window: int, stats_dtype: StatsDtype) -> Tensor:
    """Each slot's part of the entropies of the window's attention, [B,H_kv,G,T] float32; `model` rounds it first."""
    if stats_dtype == "model":
        return entropy(widen(window_rows(observation, window)))
    return observation.window_spread("entropy", window)
