"""Presets on a tiny model with the kernels interpreted and without them: `... run_interpreted.py 'slug:family:rows' ...`.

A process of its own, started with TRITON_INTERPRET=1, because Triton reads that when it is imported.
"""

import sys

import torch
from kv_models import prompt, tiny
from kv_runs import Run, run_greedy

from kvbench import make_policy
from kvbench.kernels import decode_attention, decode_attention_flat, jit

launches = 0
launch = decode_attention.launch


def counted(*args: object, **how: object) -> decode_attention.Attention:
    global launches
    launches += 1
    return launch(*args, **how)  # type: ignore[arg-type]


def run(slug: str, family: str, rows: int, interpreted: bool) -> Run:
    jit.INTERPRETED = interpreted
    prompts = [prompt(48 - 3 * row, seed=row) for row in range(rows)]
    budget = {} if slug == "full" else {"budget": 36}
    return run_greedy(tiny(family, dtype=torch.float32), prompts, make_policy(slug, **budget), new_tokens=5)


torch.set_num_threads(1)
decode_attention.launch = decode_attention_flat.launch = counted
for case in sys.argv[1:]:
    slug, family, rows = case.split(":")
    expected, launches = run(slug, family, int(rows), interpreted=False), 0
    got = run(slug, family, int(rows), interpreted=True)
    assert launches > 0, f"{case}: no kernel was launched"
    assert got.tokens == expected.tokens, f"{case}: {got.tokens} instead of {expected.tokens}"
    assert got.kept == expected.kept, f"{case}: other tokens were kept"
    assert all(torch.isfinite(layer.keys).all() for layer in got.cache.layers)  # type: ignore[union-attr]
    print(case, launches, "launches")
