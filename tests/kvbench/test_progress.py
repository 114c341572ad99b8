"""How calls of the model are cut into steps: whatever the calls, a sequence sees the same blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_models import tiny

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.cache.sequence import CachedSequence
from kvbench.policies.schedule import Blocks, Prompt, Schedule, Span


def steps_of(schedule: Schedule, prompt: int, calls: list[int]) -> list[Span]:
    """All steps of a sequence whose tokens come in the given calls."""
    out, first = [], 0
    for count in calls:
        out += schedule.steps(first, count, prompt)
        first += count
    return out


@st.composite
def taken_in(draw: st.DrawFn) -> tuple[Schedule, int, list[int]]:
    """A schedule, a prompt length, and calls that bring the prompt and some decoded tokens."""
    size = draw(st.sampled_from([None, 1, 3, 8, math.inf]))
    decode = draw(st.sampled_from(["evict", "grow"]))
    schedule = Prompt(decode=decode) if size is None else Blocks(decode=decode, size=size)
    return schedule, draw(st.integers(1, 30)), draw(st.lists(st.integers(1, 13), min_size=1, max_size=12))


@settings(max_examples=200)
@given(case=taken_in())
def test_steps_take_every_token_once_and_evict_where_blocks_end(case: tuple[Schedule, int, list[int]]) -> None:
    schedule, prompt, calls = case
    steps = steps_of(schedule, prompt, calls)
    assert [p for step in steps for p in range(step.start, step.end)] == list(range(sum(calls)))
    size = schedule.size if isinstance(schedule, Blocks) else math.inf
    for step in steps:
        if step.phase == "decode":
            assert step.start >= prompt
            assert step.evicts == (schedule.decode == "evict")
            assert step.end - step.start == 1 or not step.evicts
        else:
            assert step.end <= prompt
            assert step.evicts == (step.end == prompt or step.end % size == 0)
            assert step.start // size == (step.end - 1) // size  # inside one block
            assert step.opens == (step.start % size == 0)


@pytest.mark.parametrize(
    ("schedule", "calls", "expected"),
    [
        (Prompt(), [7, 1], [(0, 7, True), (7, 8, True)]),
        (Prompt(decode="grow"), [3, 4, 2], [(0, 3, False), (3, 7, True), (7, 9, False)]),
        (Blocks(size=3), [7, 1], [(0, 3, True), (3, 6, True), (6, 7, True), (7, 8, True)]),
        (Blocks(size=3), [5, 4], [(0, 3, True), (3, 5, False), (5, 6, True), (6, 7, True), (7, 8, True), (8, 9, True)]),
        (Blocks(size=math.inf), [7], [(0, 7, True)]),
    ],
)
def test_steps_as_cut_by_hand(schedule: Schedule, calls: list[int], expected: list[tuple[int, int, bool]]) -> None:
    assert [(s.start, s.end, s.evicts) for s in steps_of(schedule, 7, calls)] == expected


def sequence(block: int | None = None, length: int | None = None) -> CachedSequence:
    fields = {} if block is None else {"block": block}
    return CachedSequence(tiny().config, make_policy("tova", 4, **fields), length)


def spans(one: CachedSequence, *calls: int) -> list[Span]:
    """The steps of calls of so many tokens."""
    found = []
    for count in calls:
        one.begin_call(count, count)
        found += one.spans
    return found


def test_another_prompt_has_blocks_of_its_own() -> None:
    """Blocks of 3 count from the second prompt's first token, 7, not from the conversation's."""
    one = sequence(block=3, length=5)
    spans(one, 5, 1, 1)
    one.next_prompt(4, None)
    got = spans(one, 4, 1)
    assert [(span.start, span.end) for span in got] == [(7, 10), (10, 11), (11, 12)]
    assert [span.phase for span in got] == ["block", "block", "decode"]
    assert all(span.opens for span in got)
    assert one.budgets.prompt == 11


def test_a_prompt_is_opened_once_the_last_one_is_in() -> None:
    model = prepare(tiny())
    cache, ids = KVCache(model.config, make_policy("tova", 4), prompt_length=5), torch.tensor([[1, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match="before the first prompt, whose length is given already"):
        cache.next_prompt(3)
    model(ids[:, :2], past_key_values=cache)
    with pytest.raises(ValueError, match="the last prompt of sequence 0, which still has 3 tokens"):
        cache.next_prompt(3)
    model(ids[:, 2:], past_key_values=cache)
    for wrong in (0, True, 2.5, [2, 3]):
        with pytest.raises(ValueError, match="prompt"):
            cache.next_prompt(wrong)
