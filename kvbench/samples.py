"""What is known about one finished example, and the append-only file that holds them.

`samples.jsonl` is the ground truth of a run: one line per example, in order, on disk before the next example starts.
Everything else (metrics, tables) is computed from it.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kvbench.sample_check import problem

FILE_NAME = "samples.jsonl"

log = logging.getLogger(__name__)


class RunBusyError(RuntimeError):
    """Another process is writing this run."""


class RunLostError(RuntimeError):
    """The file of this run was deleted, replaced or changed while it was computed."""


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

    kept_tokens: [L][H_kv]. spare_bytes: those of cache_bytes in which no token lies. full_cache_bytes: keys and values
    of prompt and answer in the model's dtype, nothing else. decode_steps: calls of the model after the prefill, one for
    each token after the first, and for the EOS where one came.
    An example whose tokens were given has a likelihood (only then is it part of the line), and no output or score.
    One with several rated continuations: tokens and bytes are those of the longest, peak_bytes of the largest.
    evicted: share of its requests whose cache held fewer tokens than were read. measures: what else the benchmark's
    own aggregates are made of, by name (part of the line only where there is any).
    device_peak_bytes: the most memory allocated on the CUDA devices meanwhile, weights included; null on CPUs.
    A failed example (it broke its budget) has `error` set, and no output, score or measurements.
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
    generated_tokens: int | None = None
    decode_steps: int | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    error: str | None = None
    likelihood: Likelihood | None = None
    evicted: float | None = None
    measures: dict[str, Any] | None = None


def read_samples(path: Path) -> list[Sample]:
    """The finished examples of a run; a cut-off last line (a killed run) is left out, with a warning.

    Raises ValueError, naming file and line, where any other line is damaged, or a value is none that a run can write.
    """
    if not path.exists():
        return []
    return _parse(path, path.read_bytes())[0]


class SampleFile:
    """The open `samples.jsonl` of a run: what is there already, and the one way to add to it."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self.samples, self._end = _parse(path, path.read_bytes())
        # The next line must start right after the last good one.
        stream.truncate(self._end)

    def check(self) -> None:
        """Raise RunLostError where the file is no longer the one that was opened, with what was written to it."""
        held = os.fstat(self._stream.fileno())
        try:
            found = self._path.stat()
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            raise RunLostError(
                f"{self._path} was deleted or replaced while its run was computed, so the run stops: the same command "
                "computes again what is missing"
            )
        if held.st_size != self._end:
            raise RunLostError(f"{self._path} was changed while its run was computed, so the run stops: restore it")

    def append(self, sample: Sample) -> None:
        """Add a line and wait until it is on disk.

        Raises OSError (a full disk, say), and the file then ends with the last whole line; RunLostError where the file
        is gone; ValueError for a sample that could not be read back.
        """
        assert sample.index == len(self.samples), f"example {sample.index} written as number {len(self.samples)}"
        self.check()
        wrong = problem(sample)
        if wrong is not None:
            raise ValueError(f"example {sample.index}: {wrong}")
        values = asdict(sample)
        for name in ("likelihood", "measures"):  # most tasks know nothing of them
            if values[name] is None:
                del values[name]
        line = json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            # Unbuffered: a write may take only part of the line before the disk is full.
            written = 0
            while written < len(line):
                written += self._stream.write(line[written:])
            os.fsync(self._stream.fileno())
        except OSError:
            self._stream.truncate(self._end)
            raise
        self._end += len(line)
        self.samples.append(sample)


@contextmanager
def open_samples(path: Path) -> Iterator[SampleFile]:
    """Open (or create) the samples file of a run for this process alone; a damaged last line is cut off.

    Raises RunBusyError where another process has it open, ValueError where a line before the last is damaged
    or a value is none that a run can write.
    """
    with path.open("ab", buffering=0) as stream:
        try:
            # The lock lies on the file itself and dies with the process: nothing stale is left by kill -9.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusyError(f"another process is computing this run: {path} is locked") from None
        yield SampleFile(path, stream)


def _parse(path: Path, content: bytes) -> tuple[list[Sample], int]:
    """The samples of a file, and the length in bytes of the part that is whole."""
    lines = io.BytesIO(content).readlines()
    samples: list[Sample] = []
    end = 0
    for number, line in enumerate(lines, start=1):
        sample = _sample(line, index=number - 1)
        if sample is None:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number}: not the sample of example {number - 1}; "
                    f"delete the file to compute the run again, or restore it"
                )
            log.warning("%s: the last line was cut off and is dropped; example %d is computed again", path, number - 1)
            break
        wrong = problem(sample)
        if wrong is not None:
            raise ValueError(f"{path}, line {number}: {wrong}; delete the file to compute the run again, or restore it")
        samples.append(sample)
        end += len(line)
    return samples, end


def _sample(line: bytes, index: int) -> Sample | None:
    """The sample a line holds, or None where the line is not a whole sample of that index."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or values.get("index") != index:
        return None
    try:
        given = values.pop("likelihood", None)
        return Sample(**values, likelihood=None if given is None else Likelihood(**given))
    except TypeError:  # a field is missing, or is none of ours
        return None
