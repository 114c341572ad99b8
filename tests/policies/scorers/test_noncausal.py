"""Non-causal attention: a chunk's tokens judge each other, whichever came first."""

import math

import pytest
from kv_crafted import Crafted, drawn, rankings
from kvpress_kept import assert_same, presses
from torch import Tensor

from kvbench import make_policy


def by_hand(q: Tensor, k: Tensor, v: Tensor, chunk: int, scaling: float) -> list[list[float]]:
    """Standardised scores of every head's tokens, number by number."""
    group, tokens = q.shape[0] // k.shape[0], k.shape[1]
    scores = []
    for head in range(k.shape[0]):
        drawn_by = [0.0] * tokens
        for query_head in range(head * group, (head + 1) * group):
            for i in range(tokens):
                own = range(i // chunk * chunk, min(tokens, (i // chunk + 1) * chunk))
                weights = {j: math.exp(scaling * float(q[query_head, i] @ k[head, j])) for j in own}
                for j in own:
                    drawn_by[j] += weights[j] / sum(weights.values()) / group
        weighed = [0.0, *(a * float(v[head, j].norm()) for j, a in enumerate(drawn_by)), 0.0]
        scores.append([sum(weighed[j : j + 3]) / 3 for j in range(tokens)])
    every = [score for head in scores for score in head]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in every) / (len(every) - 1))
    return [[(score - mean) / deviation for score in head] for head in scores]


def test_a_prompt_in_calls_that_cut_its_chunks_is_judged_as_in_one() -> None:
    q, k, v = drawn(23, 4, 2)
    layer = Crafted(make_policy("noncausal", 10, chunk=5), 4, 2, prompt_length=23)
    with rankings() as seen:
        for first, last in ((0, 3), (3, 19), (19, 23)):
            layer.call(q[:, :, first:last], k[:, :, first:last], v[:, :, first:last], scaling=0.3)
    expected = by_hand(q[0], k[0], v[0], 5, 0.3)
    assert seen[-1].scores(head=1) == pytest.approx(expected[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("length", "chunk"), [(90, 16), (96, 16), (60, 256)])
def test_kvpress_keeps_the_same_as_its_code_does_it(length: int, chunk: int) -> None:
    kvpress = presses()
    press = kvpress.NonCausalAttnPress(chunk_size=chunk)
    assert_same("noncausal", press, 35, length, chunk=chunk, official=True)
