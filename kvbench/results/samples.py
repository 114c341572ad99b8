"""`samples.jsonl`, the append-only file of a run's finished examples, one `Sample` per line.

The lines are in order. A line is on disk (synced) when `append` returns, which is called as soon as the example
and those before it are computed; `engine.save_seconds` limits how many have started and are not on disk. Metrics and
tables are computed from the lines.
"""

from __future__ import annotations

import io
import json
import logging
import os
import textwrap
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from kvbench.errors import LARGEST
from kvbench.results.files import RunLostError, held, is_open_at, read_bytes, sync_folder, write_atomically
from kvbench.results.repetition import Repetition


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
class Divergence:
    """How a policy's next-token distributions Q differ from those of the full cache P, token by token, [n] each.

    Both were fed the same tokens y. kl: sum of P log(P / Q) over the vocabulary, in nats; null if it is infinite.
    delta_logprob, delta_p: log Q(y) - log P(y), and Q(y) - P(y). same_top: 1 if both have the same most likely token,
    else 0. agrees: 1 if greedy decoding under the policy would choose y. answer: the text of y.
    """

    answer: str
    kl: list[float | None]
    delta_logprob: list[float | None]
    delta_p: list[float]
    same_top: list[int]
    agrees: list[int]

    @property
    def mean_kl(self) -> float | None:
        """Mean KL in nats per token; infinite if one is. None for an empty answer."""
        return fmean(inf if kl is None else kl for kl in self.kl) if self.kl else None

    @property
    def first(self) -> int | None:
        """The index of the first token that the policy would not choose (greedy decoding); None: there is none."""
        return self.agrees.index(0) if 0 in self.agrees else None


@dataclass(frozen=True)
class Sample:
    """One finished example: one line of samples.jsonl.

    Bytes and kept tokens are counted after the last generated token. Seconds are wall time. Fields marked with * are
    part of the line only if they have a value.

    kept_tokens: [L][H_kv] tokens held.
    kept_heads*: by how many KV heads of all layers each token of the prompt is held (see `KeptHeads`).
    cache_bytes: keys, values, positions, statistics and states, without spare bytes.
    spare_bytes: reserved but unused bytes.
    peak_bytes: the maximum of held plus spare bytes.
    state_bytes*: the states of recurrent layers, part of cache_bytes.
    device_peak_bytes: the most memory allocated on the CUDA devices, including weights; null on CPUs.
    full_cache_bytes, full_position_bytes: keys and values of prompt and answer in the model's dtype; their positions, 0
    if the cache stores none.
    decode_steps: model calls after the prefill: one for each token after the first, including an EOS.
    kept_spans*: the share of the tokens of each named part of the prompt that is held, mean over layers and KV heads.
    kept_spans_start*: the same when the answer begins. kept_prompt*, heads_whole*: also then, the share of all tokens
    of the prompt, and the share of KV heads (of all layers) that hold all tokens of a part.
    max_new_tokens*: the limit of the answer's length. finish_reason*: "stop" (a stop token or text) or "length".
    kv_footprint*: entries held, summed over all fed tokens, as a share of the full cache's (`kvbench.cache.footprint`).
    answer*: the part of the output that is scored, if it is not all of it: the text after a thought. in_thought*: true
    if the output ends inside a thought, so that it has no answer.
    clipped*: numbers of keys and values that the fixed scales of a store cannot hold, of all coded tokens and layers;
    they are stored as the largest one.
    repetition*: repeated 4-grams, and the loop in which the generated tokens end.
    divergence*: of an answer that was fed to the policy; such an example has no output or score.
    likelihood*: of given tokens; such an example has no output or score. With several rated continuations, tokens and
    bytes are those of the longest one, and peak_bytes is the maximum.
    evicted: share of the requests whose cache held fewer tokens than it received.
    measures*: further values, by name, from which the benchmark computes its own aggregates.
    context_tokens*: number of prompt tokens that were compressed before the question (compress=context).
    pre_pass_tokens*: tokens of extra forward passes before eviction. A pass through the first layers counts all tokens.
    pre_pass_steps*: number of these passes, one after the other.
    read_tokens*: [L][H_kv] tokens that the last decoded token attended to, with sparse attention. read_bytes*: their
    keys, values and positions, and the summaries that were read, over all layers.
    masked_tokens*: [L][H_kv] tokens held whose keys the policy masks, so that they take memory but no part in
    attention.
    watched*: numbers of watchers of evictions (`watch=`), by name.
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
    pre_pass_steps: int | None = None
    read_tokens: list[list[int]] | None = None
    read_bytes: int | None = None
    state_bytes: int | None = None
    masked_tokens: list[list[int]] | None = None
    sample: int | None = None
    recomputed_tokens: int | None = None
    kept_spans: dict[str, float] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    kv_footprint: float | None = None
    answer: str | None = None
    in_thought: bool | None = None
    divergence: Divergence | None = None
    repetition: Repetition | None = None
    kept_spans_start: dict[str, float] | None = None
    kept_prompt: float | None = None
    heads_whole: dict[str, float] | None = None
    clipped: int | None = None
    watched: dict[str, float | None] | None = None

    @property
    def shared(self) -> bool:
        """Whether it was batched with other sequences."""
        return (self.shared_prefill or 1) > 1 or (self.rows_in_flight or 1) > 1


FILE_NAME = "samples.jsonl"
# Fields that a line has only if they have a value.
_OPTIONAL = (
    *("likelihood", "measures", "context_tokens", "kept_heads"),
    *("shared_prefill", "rows_in_flight", "max_new_tokens", "pre_pass_tokens", "pre_pass_steps"),
    *("read_tokens", "read_bytes"),
    *("sample", "state_bytes", "masked_tokens", "recomputed_tokens", "finish_reason", "kv_footprint", "kept_spans"),
    *("answer", "in_thought", "divergence", "repetition", "kept_spans_start", "kept_prompt", "heads_whole"),
    *("clipped", "watched"),
)

log = logging.getLogger(__name__)


def read_samples(path: Path) -> list[Sample]:
    """The finished examples of a run. An incomplete last line (of a killed run) is skipped with a warning.

    Raises ValueError with file and line if another line is damaged.
    """
    return _parse(path, read_bytes(path))[0] if path.exists() else []


class SampleFile:
    """The open `samples.jsonl` of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("ab", buffering=0)
        try:
            sync_folder(path.parent)
            self.samples, self._end = _parse(path, read_bytes(path))
        except BaseException:
            self._stream.close()
            raise
        self._stream.truncate(self._end)  # the next line starts after the last complete one

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def check(self) -> None:
        """Raise RunLostError if the file was deleted, replaced or changed by another process."""
        if not is_open_at(self.path, self._stream):
            raise RunLostError(
                f"{self.path} was deleted or replaced while its run was computed, so the run stops: run the same "
                "command again to compute the missing examples"
            )
        if os.fstat(self._stream.fileno()).st_size != self._end:
            raise RunLostError(f"{self.path} was changed while its run was computed, so the run stops: restore it")

    def append(self, sample: Sample) -> None:
        """Add a line and wait until it is on disk.

        Raises OSError (for example a full disk; the file then ends with the last complete line), RunLostError if the
        file was replaced, and ValueError for an invalid score.
        """
        assert sample.index == len(self.samples), f"{sample.index} written as {len(self.samples)}"
        self.check()
        _check_score(sample, f"example {sample.index}")
        line = _line(sample)
        try:
            # Unbuffered: a write may store only a part of the line if the disk is full.
            written = 0
            while written < len(line):
                written += self._stream.write(line[written:])
        finally:  # after an interrupt too: a complete line stays, and the next one starts at the beginning of a line
            if os.fstat(self._stream.fileno()).st_size == self._end + len(line):
                self._end += len(line)
                self.samples.append(sample)
            else:
                self._stream.truncate(self._end)
        os.fsync(self._stream.fileno())

    def replace(self, sample: Sample) -> None:
        """Replace a failed sample atomically."""
        self.check()
        _check_score(sample, f"example {sample.index}")
        self.samples[sample.index] = sample
        content = b"".join(map(_line, self.samples))
        write_atomically(self.path, content.decode())
        self._stream.close()
        self._stream, self._end = self.path.open("ab", buffering=0), len(content)


@contextmanager
def open_samples(path: Path) -> Iterator[SampleFile]:
    """Open or create the samples file of a run and lock it; an incomplete last line is removed.

    Raises RunBusyError if another process has it open, ValueError if a line before the last is damaged.
    """
    with held(path.parent):
        file = SampleFile(path)
        try:
            yield file
        finally:
            file.close()


def _line(sample: Sample) -> bytes:
    values = {k: v for k, v in vars(sample).items() if v is not None or k not in _OPTIONAL}
    return json.dumps(values, ensure_ascii=False, allow_nan=False, default=vars).encode() + b"\n"


def _parse(path: Path, content: bytes) -> tuple[list[Sample], int]:
    """The samples of a file, and the length in bytes of its complete lines."""
    lines = io.BytesIO(content.rstrip(b"\0")).readlines()  # after a power cut a file may end with zeros
    samples: list[Sample] = []
    end = 0
    for number, line in enumerate(lines, start=1):
        sample = _sample(line, index=number - 1)
        if sample is None:
            which = f"example {number - 1}"
            if number < len(lines) or not line.startswith(b"{") or line.endswith(b"\n"):
                raise ValueError(
                    f"{path}, line {number}: not the sample of {which}; "
                    f"delete the file to compute the run again, or restore it"
                )
            log.warning("%s: the incomplete last line is left out; its command computes %s again", path, which)
            break
        _check_score(sample, f"{path}, line {number}")
        _check_types(sample, f"{path}, line {number}")
        samples.append(sample)
        end += len(line)
    return samples, end


def _check_score(sample: Sample, where: str) -> None:
    """Raise ValueError for a score outside 0 to 1; a benchmark with `measures` may use another unit."""
    score = sample.score
    if score is None:
        return
    if not isinstance(score, int | float) or (not sample.measures and not 0 <= score <= 1 + 1e-9):  # rounding
        raise ValueError(f"{where}: score={score} is not allowed, it must be a number from 0 to 1 or null")


def _check_types(sample: Sample, where: str) -> None:
    """Raise ValueError for a value that no run writes: of another type, or a number that cannot be computed with."""
    for part in (sample, sample.likelihood, sample.divergence, sample.repetition):
        for name, kind in {} if part is None else _KINDS[type(part)].items():
            value = getattr(part, name)
            if not _allowed(kind, value):
                shown = type(value).__name__ if isinstance(value, int | list | dict) else repr(value)
                raise ValueError(f"{where}: {name}={textwrap.shorten(shown, 60)} is not allowed")


def _allowed(kind: str, value: Any) -> bool:  # noqa: ANN401 - whatever JSON holds
    """Whether a value is of a declared type such as `list[list[int]] | None`. Numbers are finite and below 2**53."""
    if value is None:
        return kind.endswith(" | None")
    kind = kind.removesuffix(" | None")
    if kind == "list[int]":  # nearly all values of a file are in such lists
        numbers = isinstance(value, list) and set(map(type, value)) <= {int}
        return numbers and all(abs(end) <= LARGEST for end in (min(value, default=0), max(value, default=0)))
    if kind.startswith("list["):
        return isinstance(value, list) and all(_allowed(kind[5:-1], item) for item in value)
    if kind in ("int", "float"):
        number = isinstance(value, int if kind == "int" else int | float) and not isinstance(value, bool)
        return number and abs(value) <= LARGEST
    if kind.startswith("Literal["):
        return value in literal_eval(f"[{kind[8:-1]}]")
    return isinstance(value, {"str": str, "bool": bool, **_PARTS}.get(kind, dict))


_PARTS: dict[str, Any] = {one.__name__: one for one in (Likelihood, Divergence, Repetition)}
_KINDS = {part: {one.name: str(one.type) for one in fields(part)} for part in (Sample, *_PARTS.values())}


def _sample(line: bytes, index: int) -> Sample | None:
    """The sample of a line, or None if the line is not a complete sample with this index."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.get("index") != index:
        return None
    try:
        parts = {name: values.pop(name.lower(), None) for name in _PARTS}
        if "full_position_bytes" not in values and values.get("spare_bytes"):
            values["cache_bytes"] -= values["spare_bytes"]  # older runs included spare bytes
        values |= {k.lower(): v if v is None else _PARTS[k](**v) for k, v in parts.items()}
        return Sample(**values)
    except TypeError:  # a field is missing or unknown
        return None
