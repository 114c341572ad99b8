"""Whole policies on tiny models: what they keep and say, and which kernels were launched for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kv_models import CodePoints, prompt, tiny
from kv_runs import run_greedy

from kvbench import make_policy
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import Request
from kvbench.kernels import tiles
from kvbench.policies import observation

OVER_KEYS = ("attention_logits", "rows_and_sight", "column_sums", "attention_moments")  # what reads all keys once more


def run(
    slug: str,
    family: str = "llama",
    lengths: Sequence[int] = (48,),
    budget: int | None = 36,
    fields: dict[str, Any] | None = None,
    stored: bool = False,
) -> dict[str, Any]:
    """Prompts of these lengths in one batch, five new tokens: `tokens`; `kept` positions of each head after each call.

    `launches`: how often each kernel was launched; `second passes` over the keys for the statistics of a decoding step.
    stored: with `keys` and `values` of the last layer as well.
    """
    model = tiny(family, dtype=torch.float32)
    prompts = [prompt(length, seed=row) for row, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        launches, passes = _launches(patch), _second_passes(patch)
        done = run_greedy(model, prompts, make_policy(slug, budget, **(fields or {})), new_tokens=5)
    assert done.cache is not None
    layer = done.cache.layers[-1]
    found = {"tokens": done.tokens, "kept": done.kept, "launches": dict(launches), "second passes": passes.total()}
    return found | ({"keys": layer.keys, "values": layer.values} if stored else {})


def run_rows(slugs: Sequence[str], budgets: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """Every prompt under every policy at every budget, decoded as rows: `tokens` and `kept` by row, and `launches`."""
    model = tiny("llama", dtype=torch.float32)
    model.set_attn_implementation("kvbench")
    policies = [make_policy(slug, budget, schedule="prompt") for slug in slugs for budget in budgets]
    rows, flight = [], DecodeBatch(model)
    with pytest.MonkeyPatch.context() as patch:
        launches = _launches(patch)
        for seed, length in enumerate(lengths):
            rows += flight.admit(Request(torch.tensor([prompt(length, seed)]), 7, encoder=CodePoints()), policies)
        while flight.in_flight:
            flight.step()
    for row in rows:
        if row.error is not None:
            raise row.error
    kept = [[layer.positions.sort(-1).values.tolist() for layer in row.cache.layers] for row in rows if row.cache]
    return {"tokens": [row.tokens for row in rows], "kept": kept, "launches": dict(launches)}


def _launches(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts kernels by name, as they are launched."""
    counts: Counter[str] = Counter()
    if not tiles.INTERPRETED:
        return counts
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.fn.__name__] += 1
        return launch(self, *args, **kwargs)

    patch.setattr(GridExecutor, "__call__", counted)
    return counts


def _second_passes(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what reads the keys of the one query of a decoding step once more."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(queries: torch.Tensor, *others: Any, **how: Any) -> Any:
            counts[name] += queries.shape[2] == 1
            return function(queries, *others, **how)

        return counting

    for name in OVER_KEYS:
        patch.setattr(observation, name, counted(name, getattr(observation, name)))
    return counts
