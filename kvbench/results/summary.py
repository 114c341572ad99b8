"""`summary.json`: what tables need of a finished run besides metrics.json, in one line, so that they read no samples.

It has a digest of the files that it was made from. If one has changed, the samples are read instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from statistics import fmean
from sys import intern
from typing import Any, overload

from kvbench import tasks
from kvbench.errors import LARGEST
from kvbench.results import metrics
from kvbench.results.files import read_bytes, read_json, read_yaml, write_atomically
from kvbench.results.samples import FILE_NAME as SAMPLES
from kvbench.results.samples import Sample, read_samples
from kvbench.tasks.scores import summary_module

FILE_NAME = "summary.json"
_DESCRIBING = ("run_id", "naming", "identity")
_MADE_FROM = ("config.yaml", metrics.FILE_NAME, SAMPLES)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comparisons use of a prompt: means over its answers, or the likelihood of its given tokens.

    A mean is None if the value of an answer is unknown. length: tokens of an answer, EOS and dictated tokens included.
    cut: whether it reached max_new_tokens. failed: whether an answer failed. kl: mean KL from full, if it is finite.
    looping: whether it repeats itself until its end. rep_4: share of repeated 4-grams.
    """

    prompt_hash: str
    score: float | None
    nll: float | None = None
    tokens: int | None = None
    length: float | None = None
    cut: float | None = None
    failed: bool = False
    kl: float | None = None
    looping: float | None = None
    rep_4: float | None = None


def outcomes_of(samples: Sequence[Sample]) -> tuple[Outcome, ...]:
    """The outcome of every prompt, in order."""
    found = []
    for answers in metrics.prompts_of(samples):
        first = answers[0]
        score, length, cut, looping, rep_4 = (_mean(answers, of) for of in _OF_ANSWERS)
        nll, tokens = (first.likelihood.nll, first.likelihood.tokens) if first.likelihood else (None, None)
        failed = any(answer.error is not None for answer in answers)
        kl = None if first.divergence is None or first.divergence.mean_kl in (None, inf) else first.divergence.mean_kl
        found.append(Outcome(first.prompt_hash, score, nll, tokens, length, cut, failed, kl, looping, rep_4))
    return tuple(found)


def _mean(answers: Sequence[Sample], of: Callable[[Sample], float | None]) -> float | None:
    values = [value for answer in answers if (value := of(answer)) is not None]
    return fmean(values) if len(values) == len(answers) else None


def _score(sample: Sample) -> float | None:
    return sample.score


def _length(sample: Sample) -> float | None:
    """One token after the prompt, and one for each decoding step."""
    return None if sample.decode_steps is None or sample.generated_tokens is None else sample.decode_steps + 1


def _rep_4(sample: Sample) -> float | None:
    return None if sample.repetition is None else sample.repetition.rep_4


_OF_ANSWERS = (_score, _length, metrics.cut_off, metrics.looping, _rep_4)


class StoredSamples(Sequence[Sample]):
    """The samples of a finished run, which are read when they are used."""

    def __init__(self, path: Path, count: int, outcomes: tuple[Outcome, ...]) -> None:
        self.path, self.size, self.outcomes = path, count, outcomes

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Sample]:
        return iter(_read(self))

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: Any) -> Any:
        return _read(self)[index]


@lru_cache(maxsize=256)
def _read(stored: StoredSamples) -> list[Sample]:
    """The samples; those of the last runs that were used are kept in memory."""
    return read_samples(stored.path)


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
    # Fields of a policy may be infinite, as in config.yaml.
    write_atomically(folder / FILE_NAME, json.dumps(content, ensure_ascii=False) + "\n")


def read_summary(folder: Path) -> Summary | None:
    """The summary of a run; None if it is missing or damaged, lacks a number, or is of other files or other code."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        content = read_json(folder / FILE_NAME)
        if content["computed_from"] != _digest(folder):
            return None
        numbers = read_json(folder / metrics.FILE_NAME)
        columns = (content["outcomes"][name] for name in Outcome.__dataclass_fields__)
        rows = list(zip(*columns, strict=True))
        outcomes = tuple(Outcome(intern(key), *others) for key, *others in rows)
        complete = numbers.keys() == metrics.keys() and content["run"].keys() == {*_DESCRIBING}
        if complete and _sound(numbers) and all(map(_is_number, (v for row in rows for v in row[1:]))):
            return Summary(content["run"], numbers, StoredSamples(folder / SAMPLES, int(content["samples"]), outcomes))
    return None


def _sound(numbers: Mapping[str, Any]) -> bool:
    """Whether the numbers of metrics.json are numbers."""
    nested = ("likelihood", "official", "official_intervals", "groups", "watched", "interval")
    return all(_is_number(value) for name, value in numbers.items() if name not in nested)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= LARGEST)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256(metrics.CODE + _benchmarks())
    for name in _MADE_FROM:
        digest.update(hashlib.sha256(read_bytes(folder / name)).digest())
    return digest.hexdigest()


@cache
def _benchmarks() -> bytes:
    """A digest of the code of all benchmarks, whose aggregates are part of metrics.json."""
    files = sorted(file for root in tasks.__path__ for file in Path(root).resolve().rglob("*.py"))
    installed = ""
    with suppress(PackageNotFoundError):
        installed = version("lm-eval")
    return hashlib.sha256(installed.encode() + b"".join(file.read_bytes() for file in files)).digest()
