"""Whether a sample says what a sample can say: a file that was edited by hand is not taken for measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from math import isfinite
from typing import Any, TypeAlias

from kvbench.records.sample import Likelihood, Sample

Test: TypeAlias = Callable[[Any], bool]


def _or_null(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _text(value: object) -> bool:
    """Of whole letters: half a surrogate pair could not be written again."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _object(value: object) -> bool:
    return isinstance(value, dict) and _finite(value)


def _finite(value: object) -> bool:
    """Whether all numbers in it are, however deep: JSON has no others."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return all(map(_finite, inner)) and not (isinstance(value, float) and not isfinite(value))


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _at_least(low: float, most: float | None = None) -> Test:
    return lambda value: _number(value) and value >= low and (most is None or value <= most)


def _whole(values: object) -> bool:
    """A list of counts: there may be a thousand of them in a line."""
    return isinstance(values, list) and set(map(type, values)) <= {int} and min(values, default=0) >= 0


def _counts(value: object) -> bool:
    """[L][H_kv]."""
    return isinstance(value, list) and bool(value) and all(heads and _whole(heads) for heads in value)


_SHARE = _or_null(_at_least(0, 1 + 1e-9))  # a mean of shares may be rounded up
_COUNT = "a whole number of at least 0 or null", _or_null(lambda x: _whole([x]))
_SECONDS = "a number of at least 0 or null", _or_null(_at_least(0))
_FIRST = "a whole number of at least 1 or null", _or_null(lambda x: _whole([x]) and x > 0)
_SAMPLE: dict[str, tuple[str, Test]] = {
    "prompt_hash": ("a text", _text),
    "prompt_tokens": ("a whole number of at least 0", lambda x: _whole([x])),
    "references": ("a list of texts", lambda x: isinstance(x, list) and all(map(_text, x))),
    "metadata": ("an object without NaN", _object),
    "measures": ("an object without NaN, or null", _or_null(_object)),
    "output": ("a text or null", _or_null(_text)),
    "error": ("a text or null", _or_null(_text)),
    "evicted": ("a number from 0 to 1 or null", _SHARE),
    **dict.fromkeys(
        ("kept_tokens", "read_tokens"), ("a list of whole numbers for every layer, or null", _or_null(_counts))
    ),
    **{f.name: _COUNT for f in fields(Sample) if f.name.endswith("_bytes")},
    **{f.name: _SECONDS for f in fields(Sample) if f.name.endswith("_seconds")},
    **dict.fromkeys(("generated_tokens", "decode_steps", "max_new_tokens", "pre_pass_tokens"), _COUNT),
    **dict.fromkeys(("shared_prefill", "rows_in_flight"), _FIRST),
}


def problem(sample: Sample) -> str | None:
    """What is wrong with a sample, naming the field, its value and what is allowed; None where nothing is."""
    for name, value, allowed, fits in _tests(sample):
        if not fits(value):
            text = repr(value)
            return f"{name}={text if len(text) <= 60 else f'{text[:57]}...'} is not allowed, it must be {allowed}"
    return None


def _tests(sample: Sample) -> Iterator[tuple[str, Any, str, Test]]:
    """(field, value, what is allowed, whether a value is that), for every field."""
    for name, (allowed, fits) in _SAMPLE.items():
        yield name, getattr(sample, name), allowed, fits
    score, length = sample.score, sample.prompt_tokens
    if sample.error is not None:
        yield "score", score, "null where error is set", lambda x: x is None
    elif sample.measures:  # a benchmark's own unit
        yield "score", score, "a finite number or null", _or_null(_number)
    else:
        yield "score", score, "a number from 0 to 1 or null", _SHARE
    within = _or_null(lambda x: _whole([x]) and 0 < x < length)
    yield "context_tokens", sample.context_tokens, "a whole number above 0 and below prompt_tokens, or null", within
    if sample.kept_heads is not None:
        most = sum(map(len, sample.kept_tokens or []))
        whole = f"pairs [heads up to {most}, tokens] that add up to prompt_tokens={length}"
        yield "kept_heads", sample.kept_heads, whole, lambda x: _runs(x, most, length)
    if sample.likelihood is not None:
        yield from _likelihood(sample.likelihood)


def _likelihood(read: Likelihood) -> Iterator[tuple[str, Any, str, Test]]:
    yield "likelihood.nll", read.nll, "a finite number", _number
    yield "likelihood.tokens", read.tokens, "a whole number of at least 1", lambda x: _whole([x]) and x > 0
    rising = "rising whole numbers, the last one above likelihood.tokens"
    yield (
        "likelihood.lengths",
        read.lengths,
        rising,
        lambda x: bool(x) and _whole(x) and x == sorted(set(x)) and x[-1] > read.tokens,
    )
    same = f"{len(read.lengths)} finite numbers"
    yield (
        "likelihood.cumulative",
        read.cumulative,
        same,
        lambda x: isinstance(x, list) and all(map(_number, x)) and len(x) == len(read.lengths),
    )
    yield "likelihood.block", read.block, "a number above 0 or null", _or_null(lambda x: _number(x) and x > 0)
    yield "likelihood.max_kept_tokens", read.max_kept_tokens, "a list of whole numbers for every layer", _counts


def _runs(value: Any, most: int, length: int) -> bool:  # noqa: ANN401
    """Pairs of counts up to `most` and of tokens, `length` tokens together."""
    pairs = value if isinstance(value, list) else []
    if not all(_whole(pair) and len(pair) == 2 for pair in pairs):
        return False
    return all(heads <= most for heads, _ in pairs) and sum(tokens for _, tokens in pairs) == length
