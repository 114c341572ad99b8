"""ZipCache: saliency from probes, two kinds of tokens, and the whole cache again whenever the gap is full."""

from typing import Any

import numpy as np
import pytest
import torch
from kv_stores import attended, feed, stream
from torch import Tensor

from kvbench.policies.stores.zipcache import Kinds, ZipCache, kinds_of, lowest, probes


def queried(tokens: int, heads: int = 2, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries of twice as many heads."""
    keys, values = stream(tokens, heads, dim)
    return keys, values, 3 * torch.randn(1, 2 * heads, tokens, dim)


def recovered(x: Tensor, kinds: Kinds, side: int) -> Tensor:
    """Tokens [1,H,N,D] after coding."""
    store = ZipCache()
    return store.decode(store.mixed(x, kinds, side), side, *x.shape[2:])


def low_tokens(held: Any, side: int) -> Tensor:
    """The coded tokens of fewer bits, bool [1,H,N]."""
    ((tokens, codes),) = held.blocks[side]
    return kinds_of(codes, tokens).low


def marked(low: list[bool]) -> Kinds:
    return Kinds(torch.tensor([[low]]), sum(low))


def test_values_by_hand() -> None:
    values = torch.tensor([[[[4.0, 1, -9], [1, 0, 3]]]])
    got = recovered(values, marked([True, True]), side=1)
    torch.testing.assert_close(got[0, 0], torch.tensor([[4, 1 / 3, -9], [4 / 3, 0, 3]]))


def test_each_kind_of_key_has_its_own_scale_and_width() -> None:
    keys, _ = stream(40, heads=1, dim=4)
    low = torch.rand(40) < 0.5
    got = recovered(keys, Kinds(low[None, None], int(low.sum())), side=0)
    for kind, bits in ((low, 2), (~low, 4)):
        x, view = keys[0, 0, kind], got[0, 0, kind]
        step = (x.amax(0) - x.amin(0)) / (2**bits - 1)
        assert bool(((view - x).abs() <= step / 2 + 1e-5).all())
        codes = (view - x.amin(0)) / step
        torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-3)


def test_the_least_salient_share_is_floored_and_ties_go_to_the_earlier_token() -> None:
    saliency = torch.tensor([[[0.2, 0.1, 0.1, 0.1, 0.5, 0.3, 0.4]]])
    assert lowest(saliency, 0.3).low.tolist() == [[[False, True, True, False, False, False, False]]]
    assert lowest(saliency, 0.3).size == 2
    assert lowest(saliency[..., :5], 0.6).size == 3


def test_probes_are_the_newest_twentieth_and_as_many_drawn_from_the_rest() -> None:
    drawn = probes(1000, seed=0)
    assert drawn[:50].tolist() == list(range(950, 1000))
    assert len(drawn) == 100
    assert int(drawn[50:].max()) < 950
    assert torch.equal(drawn, probes(1000, seed=0))
    assert not torch.equal(drawn, probes(1000, seed=1))
    assert probes(4, seed=0).tolist() == [3]


@pytest.mark.parametrize(("exact", "expected"), [(False, [0.15, 0.7 / 3, 0.15, 0.4]), (True, [0.3, 0.35, 0.3, 0.4])])
def test_saliency_by_hand(exact: bool, expected: list[float]) -> None:
    rows = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.5, 0], [0.1, 0.2, 0.3, 0.4]])
    drawn = rows[[1, 3]].sum(0)[None, None]
    got = ZipCache(exact_count=exact).of_prompt(drawn, torch.arange(4)[None, None], 4, torch.tensor([1, 3]))
    torch.testing.assert_close(got[0, 0], torch.tensor(expected))


def slow_saliency(queries: Tensor, keys: Tensor, head: int, seed: int) -> np.ndarray:
    """Of every prompt token for one KV head of two query heads: probe rows built one by one."""
    tokens, dim = keys.shape[2:]
    total = np.zeros(tokens)
    for query_head in (2 * head, 2 * head + 1):
        for position in probes(tokens, seed).tolist():
            logits = keys[0, head, : position + 1].double() @ queries[0, query_head, position].double() / dim**0.5
            total[: position + 1] += logits.softmax(0).numpy()
    return total / (tokens - np.arange(tokens))


@pytest.mark.parametrize("splits", [[200], [64, 64, 72], [199, 1]], ids=str)
def test_the_prompts_kinds_follow_its_saliency_however_it_came(splits: list[int]) -> None:
    keys, values, queries = queried(200)
    held = feed(ZipCache(k=0.6, v=0.8), keys, values, splits, queries=queries, prompt=200)
    for head in (0, 1):
        order = np.argsort(slow_saliency(queries, keys, head, 0), kind="stable")
        for side, count in enumerate((120, 160)):
            low = low_tokens(held, side)[0, head].nonzero()[:, 0].tolist()
            assert low == sorted(order[:count].tolist())


def test_new_tokens_stay_exact_until_the_gap_is_full_and_then_everything_is_quantised_again() -> None:
    keys, values, queries = queried(120)
    store = ZipCache(gap=10)
    before = feed(store, keys, values, [100] + [1] * 9, queries=queries)
    assert torch.equal(before.keys[:, :, 100:], keys[:, :, 100:109])
    held = feed(store, keys, values, [100] + [1] * 9, queries=queries)
    held.append(keys[:, :, 109:110], values[:, :, 109:110], torch.tensor([[109]]))
    seen = held.keys
    attended(held, queries[:, :, 109:110], 109)
    held.settle()
    assert held.in_codes == [110, 110] == [held.used] * 2
    for side, share in enumerate((0.6, 0.6)):
        for head in (0, 1):
            logits = seen[0, head] @ queries[0, 2 * head : 2 * head + 2, 109].T / 4
            order = logits.softmax(0).sum(-1)[100:].argsort()
            low = low_tokens(held, side)[0, head, 100:].nonzero()[:, 0].tolist()
            assert low == sorted(order[: int(share * 10)].tolist())
        assert torch.equal(low_tokens(held, side)[..., :100], low_tokens(before, 0))
    assert not held.watching


def test_bytes_are_those_of_the_formula() -> None:
    keys, values = stream(1000, heads=2, dim=64, dtype=torch.float16)
    queries = torch.randn(1, 4, 1000, 64).half()
    held = feed(ZipCache(k=0.6, v=0.6), keys, values, queries=queries)
    key_words = 2 * 64 * (-(-600 * 2 // 32) + 400 * 4 // 32)  # every channel fills its last word with zeros
    value_words = 600 * 128 * 2 // 32 + 400 * 128 * 4 // 32
    assert held.sizes().kinds == {
        "codes": 4 * (key_words + value_words),
        "scales and minima": 2 * 2 * (2 * 2 * 64 + 1000) + 2 * 2 * 64,
        "full precision": 0,
        "positions": 0,
        "token kinds": 2 * 2 * -(-1000 // 32) * 4,
    }
