"""Attention in PyTorch: rows against a softmax written out slot by slot, blocks of rows against all rows at once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels import references
from kvbench.kernels.references import Attended, attention_rows, softmax_blocks


def slot_by_slot(
    query: Tensor, keys: Tensor, at: int, positions: list[int], softcap: float | None, sliding: int | None
) -> list[float]:
    """One query's row over one head's keys [T,D]: exponentials of what it may see over their sum."""
    weights = []
    for key, position in zip(keys, positions, strict=True):
        logit = float(query.double() @ key.double()) * 0.3
        logit = softcap * math.tanh(logit / softcap) if softcap else logit
        seen = 0 <= position <= at and (sliding is None or position > at - sliding)
        weights.append(math.exp(logit) if seen else 0.0)
    return [weight / sum(weights) if sum(weights) else 0.0 for weight in weights]


Scene = tuple[Tensor, Tensor, Tensor, Tensor, float | None, int | None]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Queries [B,H_q,M,D] and keys [B,H_kv,T,D] at shuffled positions, some slots empty, some queries padding."""
    batch, heads, group, new, slots = (draw(st.integers(1, high)) for high in (2, 3, 3, 5, 12))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    empty, padding = torch.rand(batch, heads, slots) < 0.2, torch.rand(batch, new) < 0.2
    stored = torch.stack([torch.randperm(20)[:slots] for _ in range(batch * heads)]).view(batch, heads, slots)
    asked = torch.randint(0, 20, (batch, new))
    return (
        torch.randn(batch, heads * group, new, 4) * 3,
        torch.randn(batch, heads, slots, 4) * 3,
        asked.masked_fill(padding, -1),
        stored.masked_fill(empty, -1).int(),
        draw(st.sampled_from([None, 2.0])),
        draw(st.sampled_from([None, 1, 3, 9])),
    )


@settings(max_examples=60)
@given(scene=scenes())
def test_every_row_is_the_softmax_over_the_stored_tokens_its_query_may_see(scene: Scene) -> None:
    queries, keys, asked, stored, softcap, sliding = scene
    rows = attention_rows(queries, keys, asked, stored, 0.3, softcap, sliding)
    group = queries.shape[1] // keys.shape[1]
    for b, h, g, m in torch.cartesian_prod(*(torch.arange(n) for n in rows.shape[:4])).view(-1, 4).tolist():
        query, at = queries[b, h * group + g, m], int(asked[b, m])
        expected = slot_by_slot(query, keys[b, h], at, stored[b, h].tolist(), softcap, sliding)
        torch.testing.assert_close(rows[b, h, g, m], torch.tensor(expected), atol=1e-6, rtol=1e-5)


@settings(max_examples=60)
@given(
    scene=scenes(),
    at_once=st.sampled_from([1, 2**12, 2**21]),
    loudness=st.sampled_from([0.01, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_blocks_of_rows_give_sums_and_output_of_all_rows_at_once(
    scene: Scene, at_once: int, loudness: float, dtype: torch.dtype
) -> None:
    queries, keys, asked, stored, softcap, sliding = scene
    queries, keys = (queries * loudness).to(dtype), keys.to(dtype)
    rows = attention_rows(queries, keys, asked, stored, 0.3, softcap, sliding)
    values = torch.randn(*keys.shape[:3], 5, dtype=dtype)
    attended = Attended(values, values.new_zeros(*queries.shape[:3], 5))
    sums = torch.zeros(*rows.shape[:3], rows.shape[-1], dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "LOGITS_AT_ONCE", at_once)
        for reached, weights, inverse in softmax_blocks(queries, keys, asked, stored, 0.3, softcap, sliding, attended):
            sums[..., reached] += (weights * inverse[..., None]).sum(-2)
    torch.testing.assert_close(sums, rows.sum(-2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(attended.out, (rows @ values[:, :, None]).flatten(1, 2), rtol=1e-5, atol=1e-5)
