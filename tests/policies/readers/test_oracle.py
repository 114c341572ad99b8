"""Oracle readers: the tokens of the largest attention against plain loops, and the bytes of looking at every key."""

import math

import pytest
import torch
from kv_crafted import Crafted, drawn

from kvbench import make_policy
from kvbench.cache.views import nbytes_read, tokens_read
from kvbench.results.labels import reads_by_oracle

LENGTH, NEW = 21, 6


def probabilities(queries: list[list[float]], keys: list[list[float]]) -> list[float]:
    """Of each token, the mean over the query heads of one KV head; the scaling is 1."""
    rows = []
    for query in queries:
        logits = [sum(x * y for x, y in zip(query, key, strict=True)) for key in keys]
        weights = [math.exp(x - max(logits)) for x in logits]
        rows.append([weight / sum(weights) for weight in weights])
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def chosen(mean: list[float], budget: int | None, mass: float) -> list[int]:
    """The largest `budget` tokens, or the fewest that reach the mass."""
    order = sorted(range(len(mean)), key=lambda j: -mean[j])
    if budget is not None:
        return sorted(order[:budget])
    count = next(n for n in range(1, len(order) + 1) if sum(mean[j] for j in order[:n]) >= mass)
    return sorted(order[:count])


@pytest.mark.parametrize(("name", "budget"), [("oracle_topk", 5), ("oracle_topp", None)])
def test_a_decoded_query_attends_to_the_tokens_of_its_largest_attention(name: str, budget: int | None) -> None:
    queries, keys, values = drawn(LENGTH + NEW, 4, 2)
    policy = make_policy(name, budget) if budget else make_policy(name, mass=0.8)
    made = Crafted(policy, 4, 2)
    made.call(*(x[:, :, :LENGTH] for x in (queries, keys, values)))
    for new in range(LENGTH, LENGTH + NEW):
        out = made.call(*(x[:, :, new : new + 1] for x in (queries, keys, values)))
        for head in range(2):
            k, v = keys[0, head, : new + 1], values[0, head, : new + 1]
            group = queries[0, 2 * head : 2 * head + 2, new]
            read = chosen(probabilities(group.tolist(), k.tolist()), budget, 0.8)
            expected = (group @ k[read].T).softmax(-1) @ v[read]
            torch.testing.assert_close(out[0, 2 * head : 2 * head + 2, 0], expected)
            counted = tokens_read(made.cache.sequence)
            assert counted[0][head] == len(read)
    made.cache.audit()
    assert made.cache.kept_tokens().tolist() == [[[LENGTH + NEW] * 2]]


def test_all_keys_and_the_chosen_values_are_counted_as_read() -> None:
    """Float64, 8 numbers a head: a key or a value is 64 bytes, a position 4."""
    queries, keys, values = drawn(LENGTH + 1, 2, 2)
    made = Crafted(make_policy("oracle_topk", 5), 2, 2)
    made.call(*(x[:, :, :LENGTH] for x in (queries, keys, values)))
    assert made.cache.nbytes == 2 * LENGTH * 132  # no summaries
    made.call(*(x[:, :, LENGTH:] for x in (queries, keys, values)))
    assert nbytes_read(made.cache.sequence) == 2 * ((LENGTH + 1) * 68 + 5 * 64)


def test_labels_call_oracles_an_upper_bound() -> None:
    for reader, expected in ((("a.Quest"), False), ("kvbench.policies.readers.oracle.OracleTopK", True), (None, False)):
        assert reads_by_oracle({"policy": {"reader": reader and {"class": reader}}}) == expected
