"""`Sample`: the record of one finished example."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Likelihood:
    """The negative log-likelihood of given tokens, in nats per token.

    nll: mean over the `tokens` that were scored. cumulative: mean over the scored tokens among the first `lengths`
    tokens of the text, at powers of two and at its end. block: tokens scored between two evictions; None without
    evictions. max_kept_tokens [L][H_kv]: the most tokens held during scoring, including the current block.
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
    """One finished example: one line of samples.jsonl.

    Bytes and kept tokens are counted after the last generated token. Seconds are wall time. Fields marked with * are
    part of the line only if they have a value.

    kept_tokens: [L][H_kv] tokens held.
    kept_heads*: by how many KV heads of all layers each token of the prompt is held (see `results.kept_heads`).
    cache_bytes: keys, values, positions, statistics and states, without spare bytes.
    spare_bytes: reserved but unused bytes.
    peak_bytes: the maximum of held plus spare bytes.
    state_bytes*: the states of recurrent layers, part of cache_bytes.
    device_peak_bytes: the most memory allocated on the CUDA devices, including weights; null on CPUs.
    full_cache_bytes, full_position_bytes: keys and values of prompt and answer in the model's dtype; their positions.
    decode_steps: model calls after the prefill: one for each token after the first, including an EOS.
    max_new_tokens*: the limit of the answer's length.
    likelihood*: of given tokens; such an example has no output or score. With several rated continuations, tokens and
    bytes are those of the longest one, and peak_bytes is the maximum.
    evicted: share of the requests whose cache held fewer tokens than it received.
    measures*: further values, by name, from which the benchmark computes its own aggregates.
    context_tokens*: number of prompt tokens that were compressed before the question (compress=context).
    pre_pass_tokens*: tokens of extra forward passes before eviction. A pass through the first layers counts all tokens.
    read_tokens*: [L][H_kv] tokens that the last decoded token attended to, with sparse attention. read_bytes*: their
    keys, values and positions, and the summaries that were read, over all layers.
    masked_tokens*: [L][H_kv] tokens held whose keys a press of kvpress masks, so that they take memory but no part in
    attention.
    sample*: number of the answer among several answers to one prompt, from 0; `index` then counts answers.
    shared_prefill*, rows_in_flight*: number of sequences that shared the prefill, and the most that were decoded as one
    batch. If either is above 1, seconds and device_peak_bytes are null. Bytes and tokens do not depend on the batch.
    recomputed_tokens*: tokens of a shared context that were computed again for this question.
    error: why the example failed (budget exceeded, NaN logits, out of memory); such an example has no output, score or
    measurements.
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
    masked_tokens: list[list[int]] | None = None
    sample: int | None = None
    recomputed_tokens: int | None = None

    @property
    def shared(self) -> bool:
        """Whether it was batched with other sequences."""
        return (self.shared_prefill or 1) > 1 or (self.rows_in_flight or 1) > 1
