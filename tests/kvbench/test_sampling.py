"""Sampled answers: what they are drawn from, the same alone and in company, and what is told of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_cells import cells_of, lines, results
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import kvbench
from kvbench.engine.compute import compute_runs
from kvbench.engine.sequence import TokenSampler, filtered, sampled
from kvbench.results.loading import read_result
from kvbench.results.metrics import metrics
from kvbench.results.pairs import paired
from kvbench.results.samples import Sample
from kvbench.results.summary import outcomes_of
from kvbench.run.run import Run
from kvbench.run.run_config import Sampling

SAMPLING = ("limit=2", "generation.temperature=1.3", "generation.samples=3")
Build = Callable[..., list[Run]]


@pytest.fixture
def cells(tiny_model: Path, tmp_path: Path) -> Build:
    """Cells of the tiny model that sample three answers to each of two prompts."""

    def build(policies: str, *fields: str, out: str = "runs", **how: Any) -> list[Run]:
        return cells_of(tiny_model, tmp_path / out, policies, *SAMPLING, *fields, **how)

    return build


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(0.6, 0.95, 20), (1.0, 0.5, 0), (1.7, 1.0, 5), (0.3, 0.01, 0), (1.0, 0.999, 999), (2.0, 1.0, 0)],
)
def test_tokens_are_drawn_from_the_distribution_of_transformers_warpers(
    temperature: float, top_p: float, top_k: int
) -> None:
    logits = 3 * torch.randn(4, 60, generator=torch.Generator().manual_seed(1))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    theirs = warpers(torch.zeros(4, 1, dtype=torch.long), logits.clone())
    assert torch.equal(filtered(logits, Sampling(temperature, top_p, top_k)), theirs)


class Given(TokenSampler):
    """Numbers given beforehand."""

    def __init__(self, sampling: Sampling, number: float) -> None:
        super().__init__(sampling, 0, 0, 0)
        self._number = number

    def next(self) -> float:
        """The one number."""
        return self._number


def test_a_token_is_drawn_where_the_sum_of_probabilities_passes_the_number() -> None:
    logits = torch.tensor([0.1, 0.2, 0.0, 0.7]).log()
    numbers = [0.0, 0.09, 0.11, 0.29, 0.31, 0.999999]
    draws = [Given(Sampling(1.0), number) for number in numbers]
    assert sampled(logits.expand(6, -1), draws).tolist() == [0, 0, 1, 1, 3, 3]
    two = [Given(Sampling(1.0, top_k=2), number) for number in numbers]  # 0.2 and 0.7 are left: 2/9 and 7/9
    assert sampled(logits.expand(6, -1), two).tolist() == [1, 1, 1, 3, 3, 3]


def test_a_sequence_draws_the_same_alone_in_a_batch_and_after_a_kill(cells: Build) -> None:
    batched, alone = cells("full,snapkv,tova"), cells("full,snapkv,tova", out="alone", rows=1)
    assert not any(compute_runs([*batched, *alone]))
    assert [results(cell) for cell in batched] == [results(cell) for cell in alone]
    written = lines(batched[0])
    assert [(line["index"], line["sample"]) for line in written] == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]
    assert len({line["prompt_hash"] for line in written}) == 2
    assert len({line["output"] for line in written}) == 6
    assert {line["shared_prefill"] for line in written} == {9}, "one prefill for three answers under three policies"
    file = alone[0].folder / "samples.jsonl"
    before = file.read_bytes()
    file.write_bytes(b"".join(before.splitlines(keepends=True)[:4])[:-30])
    (alone[0].folder / "metrics.json").unlink()
    compute_runs(alone)
    assert results(alone[0]) == results(batched[0])


def test_seed_and_sampling_fields_decide_samples_and_run_id(cells: Build) -> None:
    changed = ("seed=1", "generation.temperature=0.9", "generation.top_k=3", "generation.top_p=0.4")
    runs = [cells("full", *fields)[0] for fields in ((), *((field,) for field in changed), ("generation.samples=2",))]
    compute_runs(runs)
    assert len({run.run_id for run in runs}) == 6
    assert len({json.dumps([line["output"] for line in lines(run)]) for run in runs}) == 6
    first, *_, fewer = runs
    assert [line["output"] for line in lines(fewer)] == [lines(first)[i]["output"] for i in (0, 1, 3, 4)]
    assert read_result(first.folder).n == 2
    told = read_result(first.folder).identity["generation"]
    assert (told["decoding"], told["temperature"], told["samples"]) == ("sampled", 1.3, 3)


def answer(index: int, sample: int, score: float) -> Sample:
    return Sample(index, f"prompt {index // 3}", 9, [], score=score, sample=sample)


def test_a_score_is_the_mean_over_answers_and_its_interval_is_over_prompts() -> None:
    scores = [(1, 1, 0), (0, 0, 0), (1, 1, 1), (0, 1, 0)]
    run = [answer(3 * i + j, j, score) for i, three in enumerate(scores) for j, score in enumerate(three)]
    told = metrics(run)
    assert told["n"] == 4
    assert told["score"] == pytest.approx((2 / 3 + 0 + 1 + 1 / 3) / 4)
    assert told["pass_at_k"] == 0.75
    by_prompt = metrics([Sample(i, "p", 9, [], score=sum(three) / 3) for i, three in enumerate(scores)])
    assert (told["score_low"], told["score_high"]) == (by_prompt["score_low"], by_prompt["score_high"])
    assert by_prompt["pass_at_k"] is None
    right = [answer(s.index, s.sample or 0, 1.0) for s in run]
    difference = paired(outcomes_of(run), outcomes_of(right))
    assert (difference.difference.n, difference.difference.mean) == (4, pytest.approx(0.5))


def test_evaluate_samples_and_its_limit_counts_prompts(tiny_model: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"lengths": [300], "depths": [0.0, 0.5, 1.0], "max_new_tokens": 3, "out": tmp_path}
    sampled = {"generation.temperature": 1.3, "generation.samples": 2}
    for limit in (2, 1):  # the second reads what the first has computed
        (row,) = kvbench.evaluate(tiny_model, policies="full", limit=limit, **how, **sampled)
        assert (row.n, len(row.samples)) == (limit, 2 * limit)
