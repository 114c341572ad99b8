"""What is known about one finished example."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Likelihood:
    """How well the model predicted given tokens: -log p, in nats per token, natural logarithm.

    nll: mean over the `tokens` that were scored. cumulative: mean over those among the first `lengths` tokens of the
    text, at powers of two and at its end. block: tokens scored between two evictions; None where nothing was evicted
    while they were scored. max_kept_tokens [L][H_kv]: the most held at any time meanwhile, the block itself included.
    """

    nll: float
    tokens: int
    lengths: list[int]
    cumulative: list[float]
    block: int | None
    max_kept_tokens: list[list[int]]

    def sum_at(self, length: int) -> tuple[float, int]:
        """Sum of -log p over the scored tokens among the first `length` (one of `lengths`), and their number."""
        tokens = length - (self.lengths[-1] - self.tokens)
        return self.cumulative[self.lengths.index(length)] * tokens, tokens


@dataclass(frozen=True)
class Sample:
    """One finished example. Bytes and kept tokens are those held after the last generated token; seconds are wall time.

    kept_tokens: [L][H_kv]. cache_bytes: in use: keys, values, positions, statistics. spare_bytes: reserved beside them
    but unused, not among cache_bytes. peak_bytes: the most ever in use and spare together. full_cache_bytes: keys and
    values of prompt and answer in the model's dtype, nothing else; full_position_bytes: their positions. decode_steps:
    calls of the model after the prefill, one for each token after the first, and for the EOS where one came.
    An example whose tokens were given has a likelihood (only then is it part of the line), and no output or score.
    One with several rated continuations: tokens and bytes are those of the longest, peak_bytes of the largest.
    context_tokens: so many of the prompt were compressed before the question (part of the line only with
    compress=context).
    pre_pass_tokens: tokens that went through the model in pre-passes, before anything was evicted (part of the line
    only where the policy has a pre-pass; the shallow pass that chooses a prompt's tokens counts them all).
    read_tokens: [L][H_kv] tokens that the last decoded token's query read. read_bytes: their keys, values and
    positions, and the summaries it looked through, over all layers. Both are part of the line only where the policy has
    a reader and a token was decoded; elsewhere all that is held is read.
    sample: the number of the answer among those to one prompt, from 0, whose lines follow each other; index then counts
    answers (part of the line only where several are sampled).
    state_bytes: of recurrent layers' states, among cache_bytes (part of the line only where there are any).
    max_new_tokens: the most that the answer could have; lines of older versions do not say.
    evicted: share of its requests whose cache held fewer tokens than were read. measures: what else the benchmark's
    own aggregates are made of, by name (part of the line only where there is any).
    kept_heads: by how many KV heads of all layers each token of the prompt is held, as pairs [heads, tokens] (see
    `runs.kept_heads`); part of the line only where it was recorded.
    device_peak_bytes: the most memory allocated on the CUDA devices meanwhile, weights included; null on CPUs.
    shared_prefill: how many variants (policies with their budgets) its prefill served; rows_in_flight: the most
    examples under one policy each that were decoded with it, itself included. Where either is above 1, seconds and
    device_peak_bytes are null: they would be those of all. Bytes and tokens are its own, as if it had run alone.
    recomputed_tokens: tokens of the prompt that the model read again, though it had for an earlier question about the
    same context (part of the line only where questions share one).
    A failed example (it broke its budget, its logits were no numbers, no memory was left) has `error` set, and no
    output, score or measurements.
    """

    index: int
    prompt_hash: str
    prompt_tokens: int
    references: list[str]
    metadata: dict[str, Any] = field(default_factory=dict)
    output: str | None = None
    score: float | None = None
    kept_tokens: list[list[int]] | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    spare_bytes: int | None = None
    full_cache_bytes: int | None = None
    full_position_bytes: int | None = None
    generated_tokens: int | None = None
    decode_steps: int | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    error: str | None = None
    likelihood: Likelihood | None = None
    evicted: float | None = None
    measures: dict[str, Any] | None = None
    context_tokens: int | None = None
    kept_heads: list[list[int]] | None = None
    shared_prefill: int | None = None
    rows_in_flight: int | None = None
    max_new_tokens: int | None = None
    pre_pass_tokens: int | None = None
    read_tokens: list[list[int]] | None = None
    read_bytes: int | None = None
    state_bytes: int | None = None
    sample: int | None = None
    recomputed_tokens: int | None = None

    @property
    def shared(self) -> bool:
        """Whether it had the model to share with others."""
        return (self.shared_prefill or 1) > 1 or (self.rows_in_flight or 1) > 1

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether it failed by what the machine had to give: elsewhere, or on another day, it may not."""
        return (self.error or "").startswith(("OutOfMemoryError:", "MemoryError:"))
