"""Milliseconds of a prefill and of a decoded token, by transformers' own cache and by kvbench, for gpu_check.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

BUDGET = 1024


def transformers_times(model: Any, ids: Any, steps: int, sync: Callable[[], None]) -> tuple[float, float]:  # noqa: ANN401
    """Milliseconds of a prefill and of a decoded token of transformers' own cache."""
    import torch
    from transformers import DynamicCache

    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        for _ in range(2):  # the first is a warm-up
            sync()
            start = time.perf_counter()
            cache = DynamicCache(config=model.config)
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            sync()
            prefill = time.perf_counter() - start
        for count in (3, steps):
            start = time.perf_counter()
            for _ in range(count):
                model(ids[:, :1], past_key_values=cache, use_cache=True)
            sync()
            step = (time.perf_counter() - start) / count
    return 1e3 * prefill, 1e3 * step


def our_times(
    model: Any,  # noqa: ANN401
    ids: Any,  # noqa: ANN401
    steps: int,
    slug: str,
    fields: dict[str, Any],
    sync: Callable[[], None],
) -> tuple[float, float]:
    """Milliseconds of a prefill and of a decoded token, recorded where it can be."""
    from kvbench import make_policy
    from kvbench.config.presets import store_of
    from kvbench.engine.batch import DecodeBatch
    from kvbench.engine.sequence import Request, script_of

    model.set_attn_implementation("kvbench")
    whole = slug == "full" or store_of(slug)
    own = make_policy(slug, None if whole else min(BUDGET, ids.shape[1] // 4), **fields)
    for _ in range(2):  # the first compiles kernels
        batch = DecodeBatch(model, ids.is_cuda, strict=False)
        sync()
        start = time.perf_counter()
        (sequence,) = batch.admit(Request(script_of(ids), 2 * steps + 8, min_new_tokens=2 * steps + 8), [own])
        sync()
        prefill = time.perf_counter() - start
        if sequence.error is not None:
            raise sequence.error
    for _ in range(6):
        batch.step()
    sync()
    start = time.perf_counter()
    for _ in range(steps):
        batch.step()
    sync()
    step = (time.perf_counter() - start) / steps
    if sequence.error is not None:
        raise sequence.error
    return 1e3 * prefill, 1e3 * step
