"""A bias per slot: it counts in every route of attention, in every row a policy reads, and goes with its token."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kv_crafted import Crafted, drawn
from torch import Tensor

from kvbench import make_policy
from kvbench.kernels.prompt import masked_attention
from kvbench.kernels.query_sums import attention_moments, column_sums, window_largest
from kvbench.kernels.references import attention_rows
from kvbench.policies.mergers.merger import Eviction, Merged, Merger, MergeState
from kvbench.policies.needs import Needs
from kvbench.policies.policy import Policy


@dataclass(frozen=True)
class Doubles(Merger):
    """Every kept token counts as two: its bias is log 2. While decoding tokens just go."""

    needs = Needs(bias=True)

    def absorb(self, eviction: Eviction, memory: MergeState) -> Merged | None:
        if eviction.phase == "decode":
            return None
        slots = torch.arange(eviction.kept.shape[-1]).expand_as(eviction.kept)
        return Merged(slots, eviction.keys.clone(), eviction.values.clone(), torch.full(slots.shape, 2.0).log())


def doubling(slug: str, budget: int = 8, **fields: Any) -> Policy:
    return replace(make_policy(slug, budget, **fields), merger=Doubles())


def plain(queries: Tensor, keys: Tensor, values: Tensor, odds: Tensor) -> Tensor:
    """Attention of queries [H_q,M,D], the last M of T tokens; odds [H_kv,T]: 0 = evicted, 2 = counts twice."""
    group, (_, tokens, _) = len(queries) // len(keys), keys.shape
    keys, values, odds = (x.repeat_interleave(group, dim=0) for x in (keys, values, odds))
    weights = (queries @ keys.mT).exp() * odds[:, None]
    weights = weights.tril(tokens - queries.shape[1])
    return weights / weights.sum(-1, keepdim=True) @ values


@pytest.mark.parametrize(
    ("slug", "fields"),
    [
        ("knorm", {"decode": "grow"}),
        ("knorm", {"decode": "evict"}),
        ("h2o", {"decode": "evict"}),
        ("tova", {"decode": "evict"}),
        ("snapkv", {"window": 2}),
        ("ada_snapkv", {"window": 2}),
        ("ada_snapkv", {"window": 2, "decode": "evict"}),
    ],
)
def test_kept_tokens_count_twice_and_later_ones_once(slug: str, fields: dict[str, Any]) -> None:
    """Queries come one by one, then several at once, where the policy grows."""
    queries, keys, values = drawn(40, 4, 2)
    layer = Crafted(doubling(slug, **fields), 4, 2, prompt_length=24)
    layer.call(queries[:, :, :24], keys[:, :, :24], values[:, :, :24])
    odds = torch.zeros(2, 40, dtype=torch.float64)
    for head, kept in enumerate(layer.kept()):
        odds[head, list(kept)] = 2
    odds[:, 24:] = 1
    calls = [1] * 6 + ([] if layer.cache.policy.schedule.decode == "evict" else [5])
    start = 24
    for size in calls:
        here = slice(start, start + size)
        if size > 1:
            layer.cache.next_prompt(size)
        out = layer.call(queries[:, :, here], keys[:, :, here], values[:, :, here])
        start += size
        expected = plain(queries[0, :, here], keys[0, :, :start], values[0, :, :start], odds[:, :start])
        torch.testing.assert_close(out[0], expected)
        for head, kept in enumerate(layer.kept()):
            odds[head, [p for p in range(start) if p not in kept]] = 0


@pytest.mark.parametrize("cut", [[24], [13, 11]])
def test_a_bias_costs_four_bytes_per_slot_and_is_stored_only_if_needed(cut: list[int]) -> None:
    tokens, held = drawn(24, 2, 2), []
    for policy in (doubling("knorm", decode="grow"), make_policy("knorm", 8, decode="grow")):
        layer = Crafted(policy, 2, 2, prompt_length=24)
        for part in zip(*(x.split(cut, dim=2) for x in tokens), strict=True):
            layer.call(*part)
        held.append(layer.cache.nbytes)
        store = layer.cache.layers[0].states[0].store
        assert sum(store.sizes().kinds.values()) == store.nbytes
        assert (store.slots.bias is None) == (policy.merger != Doubles())
    assert held[0] - held[1] == 2 * 8 * 4


def repeated(keys: Tensor, odds: Tensor, *more: Tensor) -> list[Tensor]:
    """Tensors [B,H,T,...] with every slot as often as odds [T] say."""
    return [x.repeat_interleave(odds, dim=2) for x in (keys, *more)]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("queries", [3, 20])
def test_observations_equal_those_of_tokens_held_several_times(queries: int, softcap: float | None) -> None:
    random = torch.Generator().manual_seed(1)
    asked, keys = (torch.randn(2, h, n, 8, generator=random).double() for h, n in ((6, queries), (3, 20)))
    values = torch.randn(2, 3, 20, 5, generator=random).double()
    odds = torch.randint(1, 4, (20,), generator=random)
    places = torch.arange(20).expand(2, 3, 20)
    at = torch.arange(20 - queries, 20).repeat(2, 1)
    bias = odds.double().log().expand(2, 3, 20)
    many = repeated(keys, odds, places, values)
    how = (0.7, softcap)

    def together(x: Tensor) -> Tensor:
        """Sums [...,T] of what is held several times."""
        index = torch.arange(20).repeat_interleave(odds)
        return x.new_zeros(*x.shape[:-1], 20).index_add_(-1, index, x)

    readers: list[Callable[..., Tensor]] = [attention_rows, column_sums, window_largest]
    for reader in readers:
        got = reader(asked, keys, at, places, *how, bias=bias)
        torch.testing.assert_close(got, together(reader(asked, many[0], at, many[1], *how)))
    first = attention_moments(asked, keys, at, places, *how, bias=bias)[0]
    torch.testing.assert_close(first, together(attention_moments(asked, many[0], at, many[1], *how)[0]))
    out = masked_attention(asked, keys, values, at, places, *how, bias=bias)
    torch.testing.assert_close(out, masked_attention(asked, many[0], many[2], at, many[1], *how))


def test_a_store_of_codes_and_an_allocator_that_measures_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(ValueError, match="gives slots a bias, which only the stores dense and ragged support"):
        doubling("h2o_turboquant")

    @dataclass(frozen=True)
    class Windowed(Merger):
        needs = Needs(window=4)

    with pytest.raises(ValueError, match="reads the prompt's newest queries, which are released before its allocator"):
        replace(make_policy("cake", 40, window=4), merger=Windowed())
