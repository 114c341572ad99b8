"""Whole policies on tiny models, in this process or in the one that interprets Triton: what they keep and generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from kv_models import CodePoints, prompt, tiny
from kv_runs import finish, run_greedy

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import Request, script_of
from kvbench.kernels import devices


def run(
    slug: str,
    family: str = "llama",
    lengths: Sequence[int] = (48,),
    budget: float | None = 36,
    fields: dict[str, Any] | None = None,
    stored: bool = False,
    parts: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Prompts of these lengths in one batch, five new tokens: `tokens`; `kept` positions of each head after each call.

    `interpreted`: whether the kernels ran. stored: with `keys` and `values` of the last layer as well. parts: where the
    parts of the prompts begin.
    """
    model = tiny(family, dtype=torch.float32)
    prompts = [prompt(length, seed=row) for row, length in enumerate(lengths)]
    done = run_greedy(model, prompts, make_policy(slug, budget, **(fields or {})), 5, parts=parts)
    layer = done.cache.layers[-1]
    found = {"tokens": done.tokens, "kept": done.kept, "interpreted": devices.INTERPRETED}
    return found | ({"keys": layer.keys, "values": layer.values} if stored else {})


def run_rows(slugs: Sequence[str], budgets: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """Every prompt under every policy at every budget, decoded in one batch: `tokens` and `kept` by sequence."""
    model = prepare(tiny("llama", dtype=torch.float32))
    policies = [make_policy(slug, budget, schedule="prompt") for slug in slugs for budget in budgets]
    rows, flight = [], DecodeBatch(model)
    for seed, length in enumerate(lengths):
        rows += flight.admit(
            [Request(script_of(torch.tensor([prompt(length, seed)])), 5, encoder=CodePoints())], policies
        )[0]
    finish(flight)
    for row in rows:
        if row.error is not None:
            raise row.error
    kept = [[layer.positions.sort(-1).values.tolist() for layer in row.cache.layers] for row in rows if row.cache]
    return {"tokens": [row.tokens for row in rows], "kept": kept}
