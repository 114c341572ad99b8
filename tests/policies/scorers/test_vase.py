"""VaSE against the released code, and the properties of its draws."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kv_crafted import observed
from task_data import recorded
from torch import Tensor

from kvbench import make_policy
from kvbench.errors import ConfigError
from kvbench.policies.observation import Observation
from kvbench.policies.scorers.vase import VaSE

Case = dict[str, Any]


@dataclass(frozen=True)
class Given(VaSE):
    """VaSE with given draws of an eviction, by position: [H][tokens]."""

    draws: tuple[tuple[float, ...], ...] = ()

    def exponentials(self, observation: Observation) -> Tensor:
        return torch.tensor(self.draws, dtype=torch.float64)[None].gather(-1, observation.positions)


def scorer_of(case: Case, draws: Any = ()) -> Given:
    mode = case["mode"]
    return Given(
        value=mode.partition("_")[0],
        large=case["n_large"],
        sinks=case["sinks"] if "sink" in mode else 0,
        window=case["residual"],
        kernel=5 if case["smooth"] else 1,
        temperature=case["temperature"],
        sample="sample" in mode,
        draws=tuple(map(tuple, draws)),
    )


def at(case: Case, held: list[list[int]], seen: int) -> Observation:
    """The observation after `seen` tokens of slots that hold these positions, [H][n], in this order."""
    positions = torch.tensor(held)[None]
    queries, keys, values = (
        torch.tensor(case[name], dtype=torch.float64)[None] for name in ("queries", "keys", "values")
    )
    index, window = positions[..., None].expand(-1, -1, -1, keys.shape[-1]), case["residual"]
    return observed(
        keys.gather(2, index),
        queries[:, :, seen - 1 : seen],
        positions,
        seen,
        values=values.gather(2, index),
        recent_queries=queries[:, :, seen - window : seen],
        recent_positions=torch.arange(seen - window, seen)[None],
        scaling=keys.shape[-1] ** -0.5,
        budgets=(case["budget"],),
        packed=True,
        ascending=True,
        phase="decode",
    )


def by_position(pairs: list[list[Any]]) -> dict[int, float]:
    return {position: float(value) for position, value in pairs}


@pytest.mark.parametrize("order", ["position", "official"])
def test_kept_tokens_are_those_of_the_released_code(order: str) -> None:
    """Its slots are in an order of their own after the first eviction, in which its scores are then pooled. Here scores
    are pooled by position; slots in the official order, said to be in order, are pooled as there.
    """
    for case in recorded("additions3/vase.jsonl"):
        policy = replace(make_policy("vase", case["budget"], window=case["residual"]), scorer=scorer_of(case))
        heads, seen = len(case["keys"]), 0
        held: list[list[int]] = [[] for _ in range(heads)]
        for number, eviction in enumerate(case["evictions"]):
            held = [[*own, *range(seen, eviction["after"])] for own in held]
            seen = eviction["after"]
            scorer = scorer_of(case, case["draws"][number] if case["draws"] else ())
            here = at(case, held, seen)
            kept = replace(policy, scorer=scorer).rank(here, {}).select(case["budget"])[0]
            found = [sorted(here.positions[0, head][kept[head]].tolist()) for head in range(heads)]
            pooled_by_position = order == "position" and case["smooth"]
            expected = case["kept_pooled_by_position"][number] if pooled_by_position else eviction["kept"]
            assert found == [sorted(own) for own in expected], case["case"]
            assert_equal_parts(scorer, here, eviction, exact=not pooled_by_position)
            held = [*map(sorted, found)] if order == "position" else eviction["slots_after"]


def assert_equal_parts(scorer: VaSE, here: Observation, eviction: Case, exact: bool) -> None:
    """The magnitudes, L, and (pooled in the same order) the attention, by position."""
    magnitude, attention = scorer.magnitude(here)[0], scorer.attention(here)[0]
    large = scorer._large(here.sequences.budgets[0])
    for head, places in enumerate(here.positions[0].tolist()):
        own = dict(zip(places, magnitude[head].tolist(), strict=True))
        if exact:
            given = by_position(eviction["magnitude"][head])
            assert {p: own[p] for p in given} == pytest.approx(given)
            best = sorted(given, key=lambda p: (-own[p], p))[:large]
            assert sorted(best) == sorted(eviction["large"][head])
            drawn_to = dict(zip(places, attention[head].tolist(), strict=True))
            given = by_position(eviction["attention"][head])
            assert {p: drawn_to[p] for p in given if p not in best} == pytest.approx(
                {p: x for p, x in given.items() if p not in best}
            )


def uniform(positions: Tensor, seen: int, window: int, budget: int, layer: int = 0) -> Observation:
    """Tokens that all queries attend to alike."""
    heads = positions.shape[1]
    zeros = torch.zeros(1, heads, positions.shape[2], 2)
    return observed(
        zeros,
        zeros[:, :, :1],
        positions,
        seen,
        layer=layer,
        recent_queries=torch.zeros(1, heads, window, 2),
        recent_positions=torch.arange(seen - window, seen)[None],
        budgets=(budget,),
        packed=True,
        phase="decode",
    )


def survivors(evictions: int, seed: int) -> int:
    """How many of 4 x 248 tokens are left after evictions that each drop 8 of 256, all of equal attention."""
    policy = make_policy("vase", 256, window=8, large=0.0, sinks=0, seed=seed, every=8)
    held, seen = torch.arange(256).expand(1, 4, -1), 256
    for _ in range(evictions):
        new = torch.arange(seen, seen + 8).expand(1, 4, -1)
        held, seen = torch.cat([held, new], -1), seen + 8
        kept = policy.rank(uniform(held, seen, 8, 256), {}).select(256)
        held = held[kept].view(1, 4, -1)
    return int((held < 248).sum())


def test_draws_are_new_at_every_eviction() -> None:
    """Each eviction keeps 248 of the 256 older tokens: 248 (248 / 256)^40 of a head are left, here 4 x 69.6.

    With draws that never change, a token that won once wins again: 4 x 248 * 248 / (248 + 320) = 433 would be left.
    """
    assert survivors(40, seed=1) == pytest.approx(4 * 248 * (248 / 256) ** 40, abs=60)


def test_draws_differ_by_layer_seed_and_example_and_by_nothing_else() -> None:
    policy = make_policy("vase", 64, window=8, large=0.0)
    held = torch.arange(128).expand(1, 2, -1)

    def kept(policy: Any, layer: int = 0) -> list[int]:
        return policy.rank(uniform(held, 128, 8, 64, layer), {}).select(64).flatten().nonzero().flatten().tolist()

    drawn_anew = [policy.for_example(seed, example) for seed, example in ((0, 0), (0, 1), (1, 0))]
    sets = [kept(policy), kept(policy, layer=1), *map(kept, drawn_anew)]
    assert len({tuple(own) for own in sets}) == 5
    assert kept(policy) == sets[0]


def test_a_number_of_large_tokens_is_whole() -> None:
    with pytest.raises(
        ConfigError, match=r"large must be a whole number of tokens, or a share below 1 of the budget, got 1\.5"
    ):
        VaSE(large=1.5)
