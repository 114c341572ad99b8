"""Slots have no meaning of their own: where a head holds a token, and which slots are empty, changes no kept set."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kv_models import prompt, tiny
from kv_presets import kinds
from kv_runs import run_greedy
from parameters import few_fast
from torch import Tensor

from kvbench import make_policy
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.pages import Pages

LENGTH, BUDGET = 72, 48
EMPTY = 5  # slots that are added to every head
FIELDS: dict[str, dict[str, Any]] = {
    "paged_keydiff": {},
    "paged_knorm": {"reduce": "max", "heads": "own"},
    "paged_h2o": {"reduce": "sum"},
    "defensivekv": {"official": True, "scorer.window": 8},
    "critical_mass_snapkv": {"official": True, "scorer.window": 8},
    "chunkkv_ada_snapkv": {"scorer.window": 8},
    "kvcompose": {},
    "roco": {},
    "attention_matching": {},
}


def policy_of(slug: str) -> Policy:
    """The policy while it evicts from a cache whose heads hold different tokens: in blocks, or while decoding."""
    own = FIELDS.get(slug, {})
    try:
        return make_policy(slug, BUDGET, **own, schedule="blocks", block=8, decode="evict")
    except ValueError:
        return make_policy(slug, BUDGET, **own, decode="evict")


def shuffled(seen: Observation, state: State, one_set: bool) -> tuple[Observation, State]:
    """The same tokens in other slots, different ones for every head, among empty slots with numbers of their own.

    one_set: all heads hold the same token in a slot.
    """
    draw = torch.Generator().manual_seed(int(seen.seen[0]))
    batch, heads, slots = seen.positions.shape
    order = torch.rand(batch, 1 if one_set else heads, slots + EMPTY, generator=draw).argsort(-1)
    order = order.expand(-1, heads, -1)

    def moved(x: Tensor, filled: Tensor) -> Tensor:
        wide = torch.cat([x, filled.to(x.dtype)], dim=2)
        return wide.gather(2, order if x.dim() == 3 else order[..., None].expand(wide.shape))

    def noise(x: Tensor) -> Tensor:
        return 9 * torch.rand(*x.shape[:2], EMPTY, *x.shape[3:], generator=draw, dtype=torch.float64)

    slots_info = seen.slots._replace(
        ascending=False,
        packed=False,
        whole=False,
        bias=None if seen.slots.bias is None else moved(seen.slots.bias, noise(seen.slots.bias)),
        moved=None if seen.slots.moved is None else moved(seen.slots.moved, noise(seen.slots.moved)),
    )
    tensors = {name: moved(x, noise(x)) for name in ("keys", "values") for x in [getattr(seen, name)]}
    positions = moved(seen.positions, torch.full((batch, heads, EMPTY), -1))
    changed = {**tensors, "positions": positions, "slots": slots_info, "known": {}, "evictable": None}
    same = {x.name: getattr(seen, x.name) for x in fields(Observation) if x.name not in changed and x.name != "layer"}
    other = Observation(layer=getattr(seen, "layer", 0), **same, **changed)
    return other, {name: moved(x, noise(x)) for name, x in state.items()}


def kept_of(policy: Policy, ranking: Ranking, budget: int) -> list[list[tuple[int, ...]]]:
    counts = policy.allocator.heads(0, ranking, [budget] * len(ranking.seen))
    chosen = ranking.select(budget if counts is None else counts)
    return [
        [tuple(sorted(places[own].tolist())) for places, own in zip(*row, strict=True)]
        for row in zip(ranking.positions, chosen, strict=True)
    ]


@contextmanager
def compared() -> Iterator[list[int]]:
    """Every ranking after a first eviction is made twice; the number of tokens in the larger sets."""
    original: Callable[..., Ranking] = Policy.rank
    tokens: list[int] = []

    def rank(policy: Policy, seen: Observation, state: State) -> Ranking:
        copies = {name: x.clone() for name, x in state.items()}
        ranking = original(policy, seen, state)
        if not seen.slots.whole:
            one_set = isinstance(policy.selection, Pages) and policy.selection.heads != "own"
            other = original(policy, *shuffled(seen, copies, one_set))
            budget = int(seen.occupied.sum(-1).min()) - 3
            budget -= budget % 16 if isinstance(policy.selection, Pages) else 0
            expected, found = (kept_of(policy, one, budget) for one in (ranking, other))
            assert found == expected
            tokens.append(sum(map(len, expected[0])))
        return ranking

    with patch.object(Policy, "rank", rank):
        yield tokens


@pytest.mark.parametrize("slug", few_fast(sorted({*kinds(), *FIELDS}), FIELDS, pytest.mark.slow("runs every kind")))
def test_tokens_in_other_slots_among_empty_ones_are_kept_as_well(slug: str) -> None:
    policy = policy_of(slug)
    with compared() as tokens:
        run_greedy(tiny(), [prompt(LENGTH)], policy, policy.schedule.every + 2)
    assert tokens, "nothing was ranked after a first eviction"
