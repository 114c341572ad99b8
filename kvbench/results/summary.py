"""`summary.json`: what tables need of a finished run besides metrics.json, in one line, so that they read no samples.

It has a digest of the files that it was made from. If one has changed, the samples are read instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from sys import intern
from typing import Any, overload

from kvbench import tasks
from kvbench.errors import LARGEST
from kvbench.results import metrics
from kvbench.results.files import read_yaml, write_atomically
from kvbench.results.samples import FILE_NAME as SAMPLES
from kvbench.results.samples import Sample, read_samples
from kvbench.tasks.scores import summary_module

FILE_NAME = "summary.json"
_DESCRIBING = ("run_id", "naming", "identity")
_MADE_FROM = ("config.yaml", metrics.FILE_NAME, SAMPLES)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comparisons use of a prompt: its mean score over several answers, or the likelihood of its given tokens."""

    prompt_hash: str
    score: float | None
    nll: float | None = None
    tokens: int | None = None


def outcomes_of(samples: Sequence[Sample]) -> tuple[Outcome, ...]:
    """The outcome of every prompt, in order."""
    prompts = metrics.of_prompts(samples)
    rated = [(one.likelihood.nll, one.likelihood.tokens) if one.likelihood else (None, None) for one in prompts]
    return tuple(Outcome(one.prompt_hash, one.score, *pair) for one, pair in zip(prompts, rated, strict=True))


class StoredSamples(Sequence[Sample]):
    """The samples of a finished run, which are read whenever they are used."""

    def __init__(self, path: Path, count: int, outcomes: tuple[Outcome, ...]) -> None:
        self.path, self.size, self.outcomes = path, count, outcomes

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Sample]:
        return iter(read_samples(self.path))

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: Any) -> Any:
        return read_samples(self.path)[index]


@dataclass(frozen=True)
class Summary:
    """The summary of a run. run: run_id, naming and identity. numbers: the content of metrics.json."""

    run: Mapping[str, Any]
    numbers: dict[str, Any]
    samples: StoredSamples


def write_summary(folder: Path, samples: Sequence[Sample]) -> None:
    """Write the summary of a finished run; none if a module of the user computes some of its numbers."""
    module = summary_module(samples)
    if module is not None and not module.__name__.startswith(tasks.__name__):
        return
    config, rows = read_yaml(folder / "config.yaml"), outcomes_of(samples)
    columns = {name: [getattr(row, name) for row in rows] for name in Outcome.__dataclass_fields__}
    content = {
        "computed_from": _digest(folder),
        "run": {name: config[name] for name in _DESCRIBING},
        "samples": len(samples),
        "outcomes": columns,
    }
    write_atomically(folder / FILE_NAME, json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")


def read_summary(folder: Path) -> Summary | None:
    """The summary of a run; None if it is missing, damaged, or made from other files or by other code."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        content = json.loads((folder / FILE_NAME).read_bytes())
        if content["computed_from"] != _digest(folder):
            return None
        numbers = json.loads((folder / metrics.FILE_NAME).read_bytes())
        del numbers[metrics.DIGEST]
        columns = (content["outcomes"][name] for name in Outcome.__dataclass_fields__)
        outcomes = tuple(Outcome(intern(key), *others) for key, *others in zip(*columns, strict=True))
        if _sound(numbers) and all(map(_is_number, (v for o in outcomes for v in (o.score, o.nll, o.tokens)))):
            return Summary(content["run"], numbers, StoredSamples(folder / SAMPLES, int(content["samples"]), outcomes))
    return None


def _sound(numbers: Mapping[str, Any]) -> bool:
    """Whether the numbers of metrics.json are numbers."""
    nested = ("likelihood", "official", "official_intervals", "groups", "interval")
    return all(_is_number(value) for name, value in numbers.items() if name not in nested)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= LARGEST)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256(metrics.code() + _benchmarks())
    for name in _MADE_FROM:
        with (folder / name).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


@cache
def _benchmarks() -> bytes:
    """A digest of the code of all benchmarks, whose aggregates are part of metrics.json."""
    files = sorted(file for root in tasks.__path__ for file in Path(root).resolve().rglob("*.py"))
    return hashlib.sha256(version("lm-eval").encode() + b"".join(file.read_bytes() for file in files)).digest()
