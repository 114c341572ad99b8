"""Quest: what a decoded query reads against plain loops, and what is counted of it."""

import math
from typing import Any

import pytest
import torch
from kv_crafted import Crafted, drawn
from kv_models import prompt, tiny
from kv_runs import bytes_held
from torch import Tensor

from kvbench import BudgetError, KVCache, make_policy
from kvbench.cache.copies import fork
from kvbench.cache.hook import prepare
from kvbench.cache.views import nbytes_read, tokens_read
from kvbench.engine.generate import generate_tokens
from kvbench.engine.teacher_forcing import score_pair
from kvbench.models.tokens import Pair
from kvbench.policies.policy import Policy

PAGE, BUDGET, LENGTH, NEW = 4, 13, 21, 14


def quest(budget: float = BUDGET, **fields: Any) -> Policy:
    return make_policy("quest", budget, **{"page": PAGE, "first_layers": 0, **fields})


def read_by_hand(queries: list[list[float]], keys: list[list[float]]) -> list[int]:
    """Tokens that the query heads of one KV head read of what is held: three pages, as many as 13 tokens are."""
    if len(keys) <= BUDGET:
        return list(range(len(keys)))
    pages = [list(range(first, min(first + PAGE, len(keys)))) for first in range(0, len(keys), PAGE)]

    def bound(query: list[float], page: list[int]) -> float:
        ends = [(min(keys[j][d] for j in page), max(keys[j][d] for j in page)) for d in range(len(query))]
        return sum(max(x * low, x * high) for x, (low, high) in zip(query, ends, strict=True))

    mean = [sum(bound(query, page) for query in queries) / len(queries) for page in pages]
    best = sorted(range(len(pages)), key=lambda p: -mean[p])[: BUDGET // PAGE]
    return sorted(j for p in best for j in pages[p])


def attended(query: list[float], keys: list[list[float]], values: list[list[float]], read: list[int]) -> list[float]:
    """Softmax attention over the tokens read; the scaling is 1."""
    logits = [sum(x * y for x, y in zip(query, keys[j], strict=True)) for j in read]
    weights = [math.exp(x - max(logits)) for x in logits]
    return [sum(w * values[j][d] for w, j in zip(weights, read, strict=True)) / sum(weights) for d in range(len(query))]


@pytest.mark.parametrize("length", [LENGTH, 9, 16])
def test_a_decoded_query_attends_to_the_pages_of_its_largest_bounds_and_to_nothing_else(length: int) -> None:
    queries, keys, values = drawn(length + NEW, 4, 2)
    made = Crafted(quest(), 4, 2)
    made.call(*(x[:, :, :length] for x in (queries, keys, values)))
    for new in range(length, length + NEW):
        out = made.call(*(x[:, :, new : new + 1] for x in (queries, keys, values)))
        for head in range(2):
            k, v = (x[0, head, : new + 1].tolist() for x in (keys, values))
            group = queries[0, 2 * head : 2 * head + 2, new].tolist()
            read = read_by_hand(group, k)
            for own, query in enumerate(group):
                expected = torch.tensor(attended(query, k, v, read), dtype=torch.float64)
                torch.testing.assert_close(out[0, 2 * head + own, 0], expected)
            counted = tokens_read(made.cache.sequence)
            assert counted[0][head] == len(read) <= BUDGET
    made.cache.audit()
    assert made.cache.kept_tokens().tolist() == [[[length + NEW] * 2]]


def test_bytes_read_and_held_as_worked_by_hand() -> None:
    """Float64, 8 numbers a head: a token is 2 * 8 * 8 bytes and a position, a page's summary 2 * 8 * 8 bytes."""
    queries, keys, values = drawn(25, 2, 2)
    made = Crafted(quest(12), 2, 2)
    made.call(*(x[:, :, :24] for x in (queries, keys, values)))
    summaries = 2 * 6 * 128
    assert made.cache.nbytes == 2 * 24 * 132 + summaries
    made.call(*(x[:, :, 24:] for x in (queries, keys, values)))
    read = tokens_read(made.cache.sequence)
    assert nbytes_read(made.cache.sequence) == sum(read[0]) * 132 + 2 * 7 * 128
    assert made.cache.nbytes == bytes_held(made.cache.layers)


def test_copied_forced_and_asked_about_a_context_it_goes_on_as_it_would() -> None:
    model, ids = prepare(tiny()), torch.tensor([prompt(50)])
    cache = KVCache(model.config, quest(), prompt_length=30)
    out: list[Tensor] = []
    with torch.inference_mode():
        for part in ids.split([30, *[1] * 20], dim=1):
            if len(out) == 11:
                cache = fork(cache)
            out.append(model(part, past_key_values=cache).logits[:, -1])
    forced = score_pair(model, Pair(ids[0, :30].tolist(), ids[0, 30:].tolist()), quest())
    expected = torch.stack([x[0].log_softmax(-1)[t] for x, t in zip(out, ids[0, 30:], strict=False)])
    torch.testing.assert_close(forced.logprobs, expected.float(), rtol=1e-4, atol=1e-4)
    asked = generate_tokens(model, ids, quest(), max_new_tokens=1, context_tokens=30)
    assert asked.tokens == [[int(out[-1].argmax())]]
    assert tokens_read(asked.cache.sequence) == tokens_read(cache.sequence)


def test_reading_more_than_the_budget_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.cache.reading.chosen_slots", lambda reader, reading, plan: reading.visible)
    with pytest.raises(BudgetError, match=r"read 24 tokens per KV head of sequence 0 in layer 1, quest promised"):
        generate_tokens(prepare(tiny()), torch.tensor([prompt(21)]), quest(16, first_layers=1), max_new_tokens=4)
