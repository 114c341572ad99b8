"""Presets on a tiny model, kernels interpreted and without them: `python run_interpreted.py slug:family:rows ...`.

A process of its own, started with TRITON_INTERPRET=1, because Triton reads that when it is imported.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from kv_models import prompt, tiny
from kv_runs import Run, run_greedy

from kvbench import make_policy
from kvbench.kernels import decode_attention, decode_attention_flat, jit
from kvbench.policies import observation

SUMMED = ("h2o", "roco", "d2o", "caote_h2o")  # what they read while decoding is the weights of the step itself
calls = {"launches": 0, "second passes": 0}


def counted(name: str, function: Callable[..., Any], only_one_query: bool) -> Callable[..., Any]:
    def counting(queries: torch.Tensor, *others: Any, **how: Any) -> Any:
        calls[name] += not only_one_query or queries.shape[2] == 1
        return function(queries, *others, **how)

    return counting


def run(slug: str, family: str, rows: int, interpreted: bool) -> Run:
    jit.INTERPRETED = interpreted
    calls.update(dict.fromkeys(calls, 0))
    prompts = [prompt(48 - 3 * row, seed=row) for row in range(rows)]
    budget = None if slug == "full" else 36
    return run_greedy(tiny(family, dtype=torch.float32), prompts, make_policy(slug, budget), new_tokens=5)


torch.set_num_threads(1)
launch = counted("launches", decode_attention.launch, only_one_query=False)
decode_attention.launch = decode_attention_flat.launch = launch
for pass_over_keys in ("attention_logits", "rows_and_sight", "column_sums", "attention_moments"):
    function = counted("second passes", getattr(observation, pass_over_keys), only_one_query=True)
    setattr(observation, pass_over_keys, function)
for case in sys.argv[1:]:
    slug, family, rows = case.split(":")
    expected = run(slug, family, int(rows), interpreted=False)
    got = run(slug, family, int(rows), interpreted=True)
    assert calls["launches"] == 4 * 2, f"{case}: {calls} in 4 decoding steps of 2 layers"
    assert calls["second passes"] == 0 or slug not in SUMMED, f"{case}: {calls}"
    assert got.tokens == expected.tokens, f"{case}: {got.tokens} instead of {expected.tokens}"
    assert got.kept == expected.kept, f"{case}: other tokens were kept"
    sys.stdout.write(f"{case}: {calls}\n")
