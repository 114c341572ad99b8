"""EG-ChunkKV: a set worked by hand, and those of the released code."""

from typing import Any

import pytest
import torch
from kv_crafted import chosen
from task_data import recorded

from kvbench.errors import ConfigError
from kvbench.policies.positions import groups
from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.entropy_chunks import EntropyChunks


def ranked(scores: Any, positions: Any = None) -> Ranking:
    """One sequence: scores of every KV head, and positions if slots are not in order."""
    x = torch.tensor(scores, dtype=torch.float64)[None]
    places = torch.arange(x.shape[2]).expand(x.shape) if positions is None else torch.tensor(positions)[None]
    return Ranking(x, None, places, torch.zeros(x.shape, dtype=torch.bool), torch.tensor([int(places.max()) + 1]))


SPIKY = [[0.0, 9, 0, 0, 2, 2, 2, 2, 1, 1, 1, 1.5, 0, 0, 0, 0.1]]
"""Chunks of 4 with means 2.25, 2, 1.1 and 0.025, entropies 0, 1, nearly 1 and 0: only the first is high and spiky."""


def test_a_spiky_chunk_keeps_its_best_and_the_rest_of_it_comes_last() -> None:
    order = EntropyChunks(length=4, best=1).rank(ranked(SPIKY))
    assert chosen(order, 1) == [[1]]
    assert chosen(order, 5) == [[1, 4, 5, 6, 7]]
    assert chosen(order, 6) == [[1, 4, 5, 6, 7, 11]]
    assert chosen(order, 14) == [[0, 1, *range(4, 16)]]


def test_chunks_and_sets_are_those_of_the_released_code() -> None:
    for case in recorded("additions3/eg_chunkkv.jsonl"):
        selection = EntropyChunks(length=case["chunk"], best=case["low_entropy_length"])
        tokens = torch.tensor(case["scores"], dtype=torch.float64).sum(0, keepdim=True)
        count = tokens.shape[1]
        chunk = groups(torch.arange(count)[None] // case["chunk"])
        mean, entropy = selection.statistics(chunk, tokens, torch.ones_like(tokens))
        chunks = len(case["chunk_score"])
        assert mean[0, :chunks].tolist() == pytest.approx(case["chunk_score"])
        assert entropy[0, :chunks].tolist() == pytest.approx(case["chunk_entropy"], abs=1e-9)
        found = chosen(selection.rank(ranked(case["scores"])), case["budget"])
        assert found == [case["kept"]] * len(case["scores"])


def test_fewer_tokens_stay_than_a_chunk_has() -> None:
    with pytest.raises(ConfigError, match=r"best must be fewer tokens than a chunk has \(length=4\), got 4"):
        EntropyChunks(length=4, best=4)
