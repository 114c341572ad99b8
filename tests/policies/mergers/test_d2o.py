"""D2O's merging: the worked example of its specification, and laws of merged keys and values."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench import make_policy
from kvbench.policies.mergers.d2o import ThresholdedMerge
from kvbench.policies.mergers.merger import Eviction, Merged, MergeState, OneEviction, Vectors
from kvbench.policies.observation import Phase
from kvbench.policies.ranking import Ranking, protected
from kvbench.policies.scorers.scorer import protected_counts

# The worked example: one head, eight tokens; sinks 1, important 3, recent 1.
KEYS = [(1, 0), (0, 1), (3, 4), (4, 3), (-3, 4), (8, 6), (0, -2), (-1, 0)]
VALUES = [(1, 1), (2, 0), (0, 1), (1, 0), (5, 5), (1, 1), (0, 3), (4, 4)]
SCORES = [4.6, 0.9, 0.3, 1.0, 0.2, 0.1, 0.8, 0.1]


def eviction(keys: Tensor, values: Tensor, positions: Tensor, gone: Tensor, phase: Phase = "prompt") -> Eviction:
    """Of tensors [B,H,T,...]: the slots `gone` bool [B,H,T] are evicted, every other occupied one is kept."""
    occupied = positions >= 0
    return Eviction(0, phase, keys, values, positions, {}, kept=occupied & ~gone, evicted=occupied & gone)


def written(keys: Tensor, values: Tensor, merged: Merged | None) -> tuple[Tensor, Tensor]:
    """Keys and values after the merged ones were written."""
    if merged is None:
        return keys, values
    index = merged.slots[..., None].expand(-1, -1, -1, keys.shape[-1])
    return keys.scatter(2, index, merged.keys), values.scatter(2, index, merged.values)


class Example:
    """The example's cache after its prompt: key, value and score of every kept token by position."""

    def __init__(self, values: Sequence[tuple[float, float]] = VALUES, **options: Any) -> None:
        self.merger, self.memory = ThresholdedMerge(**options), MergeState()
        self.held = dict(enumerate(zip(map(list, KEYS), map(list, values), SCORES, strict=True)))
        self.evict("prompt")

    def evict(self, phase: Phase) -> None:
        places, (keys, values, scores) = list(self.held), zip(*self.held.values(), strict=True)
        positions, seen = torch.tensor(places)[None, None], torch.tensor([max(places) + 1])
        always = protected(positions, seen, *protected_counts(POLICY.scorer, [5]))
        gone = ~Ranking(torch.tensor(scores)[None, None], None, positions, always, seen).select(5)
        old = [torch.tensor(x, dtype=torch.float64)[None, None] for x in (keys, values)]
        new = written(*old, self.merger.absorb(eviction(*old, positions, gone, phase), self.memory))
        rows = zip(places, *(x[0, 0].tolist() for x in new), scores, gone[0, 0].tolist(), strict=True)
        self.held = {place: (*row, score) for place, *row, score, out in rows if not out}

    def step(self, position: int, key: list[float], value: list[float], drawn: list[float]) -> None:
        """A decoding step: the new query's attention over the cache, the new token last."""
        self.held[position] = key, value, 0.0
        rows = zip(self.held.items(), drawn, strict=True)
        self.held = {place: (*row[:2], row[2] + weight) for (place, row), weight in rows}
        self.evict("decode")


POLICY = make_policy("d2o_alloc_uniform", 5, sinks=1)
UNCHANGED = {place: (KEYS[place], VALUES[place]) for place in (0, 1, 3, 6, 7)}


@pytest.mark.parametrize(
    ("options", "merged", "tau"),
    [
        ({}, {3: ((5.026487, 4.337748), (0.675496, 0.662252))}, 0.92),  # 4 is not similar enough
        ({"merge": "average"}, {3: ((5, 4.333333), (0.666667, 0.666667))}, 0.92),
        ({"weight": "sim_mean"}, {3: ((4.96, 4.28), (0.666667, 0.653333))}, 0.92),
        ({"weight": "printed"}, {3: ((8.635766, 7.635766), (1, 1.324504))}, 0.92),
    ],
    ids=str,
)
def test_the_prompt_of_the_worked_example(
    options: dict[str, Any], merged: dict[int, tuple[tuple[float, ...], tuple[float, ...]]], tau: float
) -> None:
    example = Example(**options)
    assert float(example.memory["tau"]) == pytest.approx(tau, abs=1e-12)
    assert list(example.held) == list(UNCHANGED)
    for place, (key, value) in (UNCHANGED | merged).items():
        assert example.held[place][0] == pytest.approx(key, abs=5e-7)
        assert example.held[place][1] == pytest.approx(value, abs=5e-7)


def test_two_decoding_steps_of_the_worked_example() -> None:
    example = Example()
    for step, scores, tau, merged in (
        (  # 7 is most similar to 8, but not enough
            (8, [-3, 4], [6, 0], [0.3, 0.1, 0.2, 0.05, 0.05, 0.3]),
            {0: 4.9, 1: 1.0, 3: 1.2, 6: 0.85, 8: 0.3},
            0.696,
            {8: ([-3, 4], [6, 0])},
        ),
        (
            (9, [2, 0], [0, 6], [0.3, 0.1, 0.1, 0.1, 0.1, 0.3]),
            {0: 5.2, 1: 1.1, 3: 1.3, 6: 0.95, 9: 0.3},
            0.7688,
            {1: ([-1.350498, 2.350498], [3.800664, 0.0]), 9: ([2, 0], [0, 6])},
        ),
    ):
        example.step(*step)
        assert {place: row[2] for place, row in example.held.items()} == pytest.approx(scores)
        assert float(example.memory["tau"]) == pytest.approx(tau, abs=1e-12)
        for place, (key, value) in merged.items():
            assert example.held[place][0] == pytest.approx(key, abs=5e-7)
            assert example.held[place][1] == pytest.approx(value, abs=5e-7)


def test_without_the_threshold_the_dissimilar_token_merges_too() -> None:
    example = Example(ema=False)
    assert example.held[1][1] != list(VALUES[1])  # 4, at similarity 0.8
    assert not example.memory


def test_similarity_of_values_matches_other_tokens() -> None:
    # Values: 2 = (0,1) is nearest to 6 = (0,3); 4 and 5 = (5,5), (1,1) are nearest to 0 = (1,1).
    held = Example([*VALUES[:7], (4, -4)], similarity="values", ema=False).held
    assert held[6][1] == pytest.approx([0, 2])
    assert held[6][0] == pytest.approx([1.5, 1.0])  # keys go with their values: (0,-2) and (3,4)
    assert held[0][1] == pytest.approx([7 / 3, 7 / 3])
    assert held[3][:2] == (list(KEYS[3]), list(VALUES[3]))


def test_separate_similarities_merge_keys_and_values_into_different_tokens() -> None:
    held, by_key, by_value = (Example(similarity=similarity).held for similarity in ("separate", "keys", "values"))
    assert held == {place: (by_key[place][0], by_value[place][1], row[2]) for place, row in by_key.items()}


# Laws.


def drawn(batch: int, heads: int, tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, batch, heads, tokens, 4)
    keys, values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return keys, values


def some_gone(batch: int, heads: int, tokens: int, seed: int) -> Tensor:
    """Evicted slots, at least one kept per head, a different number in every head."""
    gone = torch.rand(batch, heads, tokens, generator=torch.Generator().manual_seed(seed)) < 0.6
    gone[..., 0] = False
    return gone


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]), st.booleans(), st.integers(3, 150))
def test_of_kept_tokens_equal_up_to_rounding_the_oldest_is_the_nearest(
    seed: int, dtype: torch.dtype, single: bool, tokens: int
) -> None:
    """Equal tokens have equal values in the first layer; the rounding of their last bits must not matter."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 1, tokens, 8, generator=random, dtype=torch.float64)
    victim, *twins = torch.randperm(tokens, generator=random)[:3].tolist()
    alike = keys[0, 0, victim] + 0.1 * torch.randn(8, generator=random, dtype=torch.float64)  # cosine about 0.99
    for slot in twins:
        noise = torch.randint(-2, 3, (8,), generator=random)
        keys[0, 0, slot] = alike * (1 + noise * torch.finfo(dtype).eps)
    keys = keys.to(dtype)
    positions = torch.randperm(tokens, generator=random)[None, None]
    one = OneEviction(0, "decode", Vectors([keys]), Vectors([keys.clone()]), positions, {}, torch.tensor([[[victim]]]))
    merger, memory = ThresholdedMerge(), MergeState()
    merged = merger.absorb_one(one, memory) if single else merger.absorb(one.masks(), memory)
    new_keys, _ = written(keys, keys.clone(), merged)
    assert (new_keys != keys).any(-1)[0, 0].nonzero().tolist() == [
        [min(twins, key=positions[0, 0].tolist().__getitem__)]
    ]


@pytest.mark.parametrize("several", [False, True])
def test_a_similarity_below_the_threshold_by_a_rounding_error_reaches_it(several: bool) -> None:
    keys = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]]], dtype=torch.float64)
    gone = torch.tensor([[[False, True, several]]])
    memory: MergeState = {"tau": torch.tensor([[1 + 4e-16]], dtype=torch.float64)}
    values = torch.tensor([[[[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]]], dtype=torch.float64)
    event = eviction(keys, values, torch.arange(3)[None, None], gone, "decode")
    _, new = written(keys, values, ThresholdedMerge(merge="average").absorb(event, memory))
    assert float(new[0, 0, 0, 0]) == pytest.approx(2 / 3 if several else 0.5)


def test_similarities_in_pieces_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = drawn(2, 2, 40, 4)
    event = eviction(keys, values, torch.arange(40).expand(2, 2, -1), some_gone(2, 2, 40, 4))
    whole = written(keys, values, ThresholdedMerge().absorb(event, {}))
    monkeypatch.setattr("kvbench.policies.mergers.d2o.SIMILARITIES_AT_ONCE", 1)
    pieces = written(keys, values, ThresholdedMerge().absorb(event, {}))
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(other, one)


def test_with_a_threshold_per_layer_the_heads_tokens_merge_together_or_not_at_all() -> None:
    # Head 0 evicts tokens at similarity 1 and 0 to the one kept, head 1 at 1 and 0.6; means 1 and 0.3, tau 0.65.
    keys = torch.tensor([[[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [3.0, 0.0], [0.6, 0.8]]]])
    values = torch.tensor([0.0, 1.0, 10.0])[None, None, :, None].expand(1, 2, -1, 2).clone()
    gone = torch.tensor([[[False, True, True]]]).expand(1, 2, -1)
    memory: MergeState = {}
    event = eviction(keys, values, torch.arange(3).expand(1, 2, -1), gone)
    _, new = written(keys, values, ThresholdedMerge(tau_scope="layer", merge="average").absorb(event, memory))
    assert float(memory["tau"]) == pytest.approx(0.65)
    assert new[0, :, 0, 0].tolist() == [0.5, 0.5]


def test_several_tokens_at_once_move_the_threshold_by_their_mean() -> None:
    keys = torch.tensor([[[[1.0, 0.0], [0.6, 0.8], [0.8, 0.6]]]])
    gone = torch.tensor([[[False, True, True]]])
    memory: MergeState = {"tau": torch.tensor([[0.2]])}
    ThresholdedMerge().absorb(eviction(keys, keys.clone(), torch.arange(3)[None, None], gone, "decode"), memory)
    assert float(memory["tau"]) == pytest.approx(0.7 * 0.7 + 0.3 * 0.2)


OPTIONS: list[dict[str, Any]] = [
    *({}, {"merge": "average"}, {"ema": False}, {"tau_scope": "layer"}),
    *({"weight": "sim_mean"}, {"weight": "printed"}, {"similarity": "values"}),
]


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(OPTIONS), st.sampled_from([None, 0.4, -0.2]))
def test_a_single_token_merges_as_one_of_several(seed: int, options: dict[str, Any], threshold: float | None) -> None:
    keys, values = drawn(3, 2, 9, seed)
    positions = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(seed + i)) for i in range(6)])
    positions = positions.view(3, 2, 9)
    positions[1, :, 4:6] = -1  # a shorter sequence
    victims = torch.tensor([[[0], [3]], [[2], [7]], [[8], [1]]])
    going = torch.tensor([True, True, False])[:, None, None]  # the last sequence does not evict
    one = OneEviction(0, "decode", Vectors([keys]), Vectors([values]), positions, {}, victims, going)
    merger, ends = ThresholdedMerge(**options), []
    for short in (False, True):
        memory: MergeState = {}
        if threshold is not None:
            memory["tau"] = torch.full((3, 1 if "tau_scope" in options else 2), threshold, dtype=torch.float64)
        merged = merger.absorb_one(one, memory) if short else merger.absorb(one.masks(), memory)
        ends.append((*written(keys, values, merged), *memory.values()))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
