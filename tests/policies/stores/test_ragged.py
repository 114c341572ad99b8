"""The ragged store: the same numbers as the dense one, and only the bytes of what each head keeps."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_models import tiny

from kvbench.cache.attention import attend
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.step import Step
from kvbench.policies.needs import Needs
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Span
from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.ragged import Ragged


@settings(max_examples=30)
@given(
    group=st.integers(1, 3),
    heads=st.integers(1, 3),
    batch=st.integers(1, 2),
    softcap=st.sampled_from([None, 5.0]),
    window=st.sampled_from([None, 9]),
    sunk=st.booleans(),
    seed=st.integers(0, 999),
)
def test_one_query_over_segments_equals_masked_dense_attention(
    group: int, heads: int, batch: int, softcap: float | None, window: int | None, sunk: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    sequence = CachedSequence(tiny().config, Policy())
    tokens, dim = 20, 8
    keys, values = torch.randn(batch, heads, tokens, dim), torch.randn(batch, heads, tokens, dim + 2)
    positions = torch.arange(tokens).expand(batch, -1)
    mask = torch.rand(batch, heads, tokens) < torch.rand(batch, heads, 1)
    query, at = torch.randn(batch, heads * group, 1, dim), torch.full((batch, 1), tokens)
    how = AttentionParams(0.3, softcap, window, torch.randn(1, heads * group) if sunk else None)
    span = Span(tokens, tokens + 1, opens=True, evicts=True, phase="decode")
    outputs = []
    for store in (Dense(), Ragged()):
        held = store.open(keys, values, (), 1)
        held.append(keys, values, positions)
        held.keep(mask, spare=1)
        new = torch.ones(batch, heads, 1, dim), torch.ones(batch, heads, 1, dim + 2)
        held.append(*new, at)
        step = Step(query, *new, at, span, how, held, policy=Policy(), sequence=sequence, layer=sequence.layers[0])
        outputs.append(attend(step, Needs()))
        assert torch.equal((held.positions >= 0).sum(-1), mask.sum(-1) + 1)
    torch.testing.assert_close(outputs[0], outputs[1])


def test_heads_share_no_padding() -> None:
    keys = torch.randn(1, 3, 50, 4)
    held = Ragged().open(keys, keys, (), 1)
    held.append(keys, keys, torch.arange(50)[None])
    mask = torch.arange(50) < torch.tensor([1, 17, 50])[:, None]
    held.keep(mask[None], spare=0)
    per_slot = 2 * 4 * 4 + 4
    assert held.nbytes < (1 + 17 + 50) * per_slot + 100
    assert held.positions[0].ge(0).sum(-1).tolist() == [1, 17, 50]
