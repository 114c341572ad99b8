"""Policies x prompt lengths x batch sizes: interleaved rounds, and one row per measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from kvbench.models.devices import copy_rate
from kvbench.tools.bench.measure import (
    Contender,
    Timing,
    contenders,
    fits,
    measure,
    out_of_memory,
    random_prompt,
    weights_read,
)
from kvbench.tools.bench.settings import Settings

MIB = 2**20
SHOWN = (
    "policy", "budget", "prompt", "batch", "prefill_ms", "decode_ms", "decoded_per_s", "each_per_s", "of_bound",
    "held_mib", "peak_mib",
)  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """Bytes of the weights that a decoding step reads, None if unknown, and the rate of a plain copy in bytes/s."""

    weights: int | None
    rate: float

    def share(self, samples: Sequence[Timing]) -> float | None:
        """The time to read the weights and the cache at this rate, over the median time of a decoding step."""
        if self.weights is None:
            return None
        step = float(np.median([one.decode_ms for one in samples])) / 1e3
        return (self.weights + samples[-1].held_bytes) / self.rate / step


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median of a measurement by its name, and its 20th and 80th percentiles."""
    low, middle, high = np.percentile(values, (20, 50, 80))
    return {name: float(middle), f"{name}_p20": float(low), f"{name}_p80": float(high)}


def rows(model: PreTrainedModel, settings: Settings) -> Iterator[list[dict[str, Any]]]:
    """The rows of each prompt length and batch size, the smallest first.

    A contender that runs out of memory has a row with the error `out of memory`, and is skipped at larger batches of
    the same length. Policies with a cache of their own have one sequence, so they are measured with batch size 1 only.
    of_bound: the time that a plain copy takes for the bytes of weights and cache, over the time of a decoding step.
    """
    everyone, _ = contenders(settings)
    weights, rate = weights_read(model), 0.0
    for length in sorted(settings.lengths):
        left = list(everyone)
        for batch in sorted(settings.batches):
            measured = [one for one in left if batch == 1 or one.policy is None or one.policy.generator is None]
            left = [one for one in measured if fits(model, one, batch, length)]
            samples = _rounds(model, left, random_prompt(model, batch, length), settings) if left else {}
            rate = max(rate, copy_rate(model.device))
            bound = Bound(weights, rate)
            yield [_row(one, samples.get(one), batch, length, settings, bound) for one in measured]
            left = [one for one in measured if one in samples]


def _rounds(
    model: PreTrainedModel, those: Sequence[Contender], ids: Tensor, settings: Settings
) -> dict[Contender, list[Timing]]:
    """The samples of every contender that fits into memory, in interleaved rounds. The first round is a warm-up."""
    samples: dict[Contender, list[Timing]] = {contender: [] for contender in those}
    what = f"{ids.shape[1]} tokens, batch {ids.shape[0]}"
    turns = [contender for _ in range(settings.rounds + 1) for contender in those]
    for contender in tqdm(turns, desc=what, leave=False, disable=None):
        if contender in samples:
            try:
                samples[contender].append(measure(model, contender, ids, settings.new_tokens))
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                del samples[contender]
    return {contender: found[1:] for contender, found in samples.items()}


def _row(
    contender: Contender, samples: Sequence[Timing] | None, batch: int, prompt: int, settings: Settings, bound: Bound
) -> dict[str, Any]:
    sizes = {"policy": contender.name, "budget": contender.budget, "prompt": prompt, "batch": batch}
    row: dict[str, Any] = {**sizes, "new_tokens": settings.new_tokens, "rounds": settings.rounds}
    if samples is None:
        return {**row, "error": "out of memory"}
    total = [one.prefill_ms + one.decode_ms * (settings.new_tokens - 1) for one in samples]
    peaks = [one.peak_bytes / MIB for one in samples if one.peak_bytes is not None]
    return {
        **row,
        **spread("prefill_ms", [one.prefill_ms for one in samples]),
        **spread("decode_ms", [one.decode_ms for one in samples]),
        **spread("total_ms", total),
        **spread("tokens_per_s", [1e3 * batch * settings.new_tokens / ms for ms in total]),
        **spread("decoded_per_s", [1e3 * batch / one.decode_ms for one in samples]),
        **spread("each_per_s", [1e3 / one.decode_ms for one in samples]),
        "of_bound": bound.share(samples),
        "copy_gb_per_s": bound.rate / 1e9,
        "held_mib": samples[-1].held_bytes / MIB,
        "peak_mib": max(peaks) if peaks else None,
        "error": "",
    }
