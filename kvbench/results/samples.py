"""`samples.jsonl`, the append-only file of a run's finished examples.

It has one line per example, in order, and is on disk before the next example starts. Metrics and tables are computed
from it.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.results.files import write_atomically
from kvbench.results.locks import RunLostError, held, is_open_at
from kvbench.results.sample import Likelihood, Sample

FILE_NAME = "samples.jsonl"
# Fields that a line has only if they have a value.
_OPTIONAL = (
    *("likelihood", "measures", "context_tokens", "kept_heads"),
    *("shared_prefill", "rows_in_flight", "max_new_tokens", "pre_pass_tokens", "read_tokens", "read_bytes"),
    *("sample", "state_bytes", "masked_tokens", "recomputed_tokens"),
)

log = logging.getLogger(__name__)


def read_samples(path: Path) -> list[Sample]:
    """The finished examples of a run. An incomplete last line (of a killed run) is skipped with a warning.

    Raises ValueError with file and line if another line is damaged.
    """
    return _parse(path, path.read_bytes())[0] if path.exists() else []


class SampleFile:
    """The open `samples.jsonl` of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("ab", buffering=0)
        try:
            self.samples, self._end = _parse(path, path.read_bytes())
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
            os.fsync(self._stream.fileno())
        except BaseException:  # including interrupts: the next line must start at the beginning of a line
            self._stream.truncate(self._end)
            raise
        self._end += len(line)
        self.samples.append(sample)

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
    lines = io.BytesIO(content).readlines()
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
            log.warning("%s: the incomplete last line is removed; %s will be computed again", path, which)
            break
        _check_score(sample, f"{path}, line {number}")
        samples.append(sample)
        end += len(line)
    return samples, end


def _check_score(sample: Sample, where: str) -> None:
    """Raise ValueError for a score outside 0 to 1; a benchmark with `measures` may use another unit."""
    score = sample.score
    if score is not None and not sample.measures and not 0 <= score <= 1 + 1e-9:  # rounding
        raise ValueError(f"{where}: score={score} is not allowed, it must be a number from 0 to 1 or null")


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
        given = values.pop("likelihood", None)
        if "full_position_bytes" not in values and values.get("spare_bytes"):
            values["cache_bytes"] -= values["spare_bytes"]  # older runs included spare bytes
        return Sample(**values, likelihood=None if given is None else Likelihood(**given))
    except TypeError:  # a field is missing or unknown
        return None
