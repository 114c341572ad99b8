"""Whether a sample says what a sample can say: a file that was edited by hand is not taken for measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import chain
from math import isfinite
from typing import Any

from kvbench.records.sample import Likelihood, Sample

Test = Callable[[Any], bool]


def problem(sample: Sample) -> str | None:
    """What is wrong with a sample, naming the field, its value and what is allowed; None where nothing is."""
    for name, value, allowed, fits in _tests(sample):
        if not fits(value):
            return f"{name}={_shown(value)} is not allowed, it must be {allowed}"
    return None


def _tests(sample: Sample) -> Iterator[tuple[str, Any, str, Test]]:
    """(field, value, what is allowed, whether a value is that), for every field."""
    yield "prompt_hash", sample.prompt_hash, "a text", _text
    yield "prompt_tokens", sample.prompt_tokens, "a whole number of at least 0", _count
    yield "references", sample.references, "a list of texts", lambda x: isinstance(x, list) and all(map(_text, x))
    yield "metadata", sample.metadata, "an object without NaN", _finite_object
    yield "measures", sample.measures, "an object without NaN, or null", _or_null(_finite_object)
    for name in ("output", "error"):
        yield name, getattr(sample, name), "a text or null", _or_null(_text)
    if sample.error is not None:
        yield "score", sample.score, "null where error is set", lambda x: x is None
    elif sample.measures:  # a benchmark's own unit
        yield "score", sample.score, "a finite number or null", _or_null(_number)
    else:
        yield "score", sample.score, "a number from 0 to 1 or null", _or_null(_share)
    fits = _or_null(lambda x: _count(x) and 0 < x < sample.prompt_tokens)
    yield "context_tokens", sample.context_tokens, "a whole number above 0 and below prompt_tokens, or null", fits
    yield "evicted", sample.evicted, "a number from 0 to 1 or null", _or_null(_share)
    yield "kept_tokens", sample.kept_tokens, "a list of whole numbers for every layer, or null", _or_null(_counts)
    if sample.kept_heads is not None:
        most, length = sum(map(len, sample.kept_tokens or [])), sample.prompt_tokens
        whole = f"pairs [heads up to {most}, tokens] that add up to prompt_tokens={length}"
        yield "kept_heads", sample.kept_heads, whole, lambda x: _runs(x, most, length)
    for field in fields(sample):
        if field.name.endswith("_bytes") or field.name in ("generated_tokens", "decode_steps", "max_new_tokens"):
            yield field.name, getattr(sample, field.name), "a whole number of at least 0 or null", _or_null(_count)
        elif field.name.endswith("_seconds"):
            yield field.name, getattr(sample, field.name), "a number of at least 0 or null", _or_null(_positive)
    for name in ("shared_prefill", "rows_in_flight"):
        at_least_one = _or_null(lambda x: _count(x) and x > 0)
        yield name, getattr(sample, name), "a whole number of at least 1 or null", at_least_one
    if sample.likelihood is not None:
        yield from _likelihood_tests(sample.likelihood)


def _likelihood_tests(read: Likelihood) -> Iterator[tuple[str, Any, str, Test]]:
    yield "likelihood.nll", read.nll, "a finite number", _number
    yield "likelihood.tokens", read.tokens, "a whole number of at least 1", lambda x: _count(x) and x > 0
    rising = "rising whole numbers, the last one above likelihood.tokens"
    yield "likelihood.lengths", read.lengths, rising, lambda x: _rising(x) and x[-1] > read.tokens
    same = f"{len(read.lengths)} finite numbers" if isinstance(read.lengths, list) else "a list of finite numbers"
    yield "likelihood.cumulative", read.cumulative, same, lambda x: _numbers(x) and len(x) == len(read.lengths)
    yield "likelihood.block", read.block, "a number above 0 or null", _or_null(lambda x: _positive(x) and x > 0)
    yield "likelihood.max_kept_tokens", read.max_kept_tokens, "a list of whole numbers for every layer", _counts


def _text(value: object) -> bool:
    """Of whole letters: half a surrogate pair could not be written again."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _finite_object(value: object) -> bool:
    return isinstance(value, dict) and _finite(value)


def _finite(value: object) -> bool:
    """Whether all numbers in it are, however deep: JSON has no others."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return all(map(_finite, inner)) and not (isinstance(value, float) and not isfinite(value))


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _positive(value: Any) -> bool:  # noqa: ANN401 - whatever JSON holds
    return _number(value) and value >= 0


def _share(value: Any) -> bool:  # noqa: ANN401
    return _number(value) and 0 <= value <= 1 + 1e-9  # a mean of shares may be rounded up


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _whole(values: list[Any]) -> bool:
    """Whether all are counts: there may be a thousand of them in a line."""
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0


def _counts(value: object) -> bool:
    """[L][H_kv]."""
    layers = value if isinstance(value, list) else []
    return bool(layers) and all(isinstance(heads, list) and heads and _whole(heads) for heads in layers)


def _runs(value: Any, most: int, length: int) -> bool:  # noqa: ANN401
    """Pairs of counts up to `most` and of tokens, `length` tokens together."""
    pairs = value if isinstance(value, list) else []
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs) or not _whole([*chain(*pairs)]):
        return False
    return all(heads <= most for heads, _ in pairs) and sum(tokens for _, tokens in pairs) == length


def _numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _rising(value: object) -> bool:
    whole = isinstance(value, list) and bool(value) and _whole(value)
    return whole and value == sorted(set(value))  # type: ignore[call-overload]


def _or_null(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
