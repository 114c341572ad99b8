"""R-KV against its equations in plain loops, in a prompt and while decoding."""

import math
from typing import Any

import pytest
from kv_crafted import Crafted, drawn

from kvbench import make_policy

WINDOW, KERNEL = 3, 5

Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(xs: Vector) -> Vector:
    powers = [math.exp(x - max(xs)) for x in xs]
    return [x / sum(powers) for x in powers]


def scored(queries: list[list[Vector]], keys: list[Vector], lam: float, official: bool) -> Vector:
    """Scores of one KV head's older tokens; queries [G][w], keys in order of position; the scaling is 1."""
    old = len(keys) - WINDOW
    rows = [softmax([max(dot(head[q], k) for head in queries) for k in keys[:old]]) for q in range(WINDOW)]
    mean = [sum(row[j] for row in rows) / WINDOW for j in range(old)]
    reach = KERNEL // 2
    drawn_by = [max(mean[max(0, j - reach) : j + reach + 1]) for j in range(old)]
    cosines = [[dot(a, b) / math.sqrt(dot(a, a) * dot(b, b)) for b in keys] for a in keys]
    for i, row in enumerate(cosines):
        row[i] = 0.0
        alike = [j for j in range(len(keys)) if row[j] > 0.5]
        if alike:
            row[max(alike)] = 0.0
        elif official:
            row[0] = 0.0
    repeated = softmax([sum(row[j] for row in cosines) / len(keys) for j in range(len(keys))])
    return [lam * drawn_by[j] - (1 - lam) * repeated[j] for j in range(old)]


def vectors(tokens: int, seed: int = 0) -> Any:
    """Two query heads and one KV head; some keys resemble each other."""
    queries, keys, values = drawn(tokens, 2, 1, seed=seed)
    keys[:, :, ::3] = keys[:, :, :1] + 0.4 * keys[:, :, ::3]
    return queries, keys, values


@pytest.mark.parametrize(("official", "lam"), [(False, None), (True, None), (False, 0.5)])
def test_kept_tokens_of_a_prompt_follow_the_equations(official: bool, lam: float | None) -> None:
    queries, keys, values = vectors(24)
    policy = make_policy("rkv", 10, window=WINDOW, kernel=KERNEL, official=official, lam=lam)
    made = Crafted(policy, 2, 1)
    made.call(queries, keys, values)
    weight = lam or (0.07 if official else 0.1)
    scores = scored(queries[0, :, -WINDOW:].tolist(), keys[0, 0].tolist(), weight, official)
    best = sorted(range(24 - WINDOW), key=lambda j: -scores[j])[: 10 - WINDOW]
    assert made.kept() == [tuple(sorted([*best, *range(24 - WINDOW, 24)]))]


@pytest.mark.parametrize("every", [1, 4])
def test_decoding_scores_what_is_held_by_the_newest_queries(every: int) -> None:
    queries, keys, values = vectors(36, seed=1)
    made = Crafted(make_policy("rkv", 10, window=WINDOW, kernel=KERNEL, every=every), 2, 1)
    made.call(*(x[:, :, :16] for x in (queries, keys, values)))
    held = list(made.kept()[0])
    for new in range(16, 36):
        made.call(*(x[:, :, new : new + 1] for x in (queries, keys, values)))
        held.append(new)
        if len(held) == 10 + every:
            window = queries[0, :, new - WINDOW + 1 : new + 1].tolist()
            scores = scored(window, keys[0, 0, held].tolist(), 0.1, False)
            best = sorted(range(len(scores)), key=lambda j: -scores[j])[: 10 - WINDOW]
            held = sorted(held[j] for j in best) + held[-WINDOW:]
        assert made.kept() == [tuple(held)]
