"""NeedleBench's grids, prompts, scores and averages, on invented files in the official formats."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import needlebench_files
import pytest
from char_tokenizer import CharTokenizer
from hypothesis import given
from hypothesis import strategies as st
from task_data import Answer

from kvbench.tasks.needlebench import build
from kvbench.tasks.needlebench.grids import V1, V2
from kvbench.tasks.needlebench.summary import heat_map
from kvbench.tasks.needlebench.task import NeedleBench
from kvbench.tasks.scores import summary
from kvbench.tasks.task import Example

KINDS = ("single_retrieval", "multi_retrieval", "multi_reasoning")
TASK = NeedleBench(counted_in="model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return needlebench_files.write(tmp_path_factory.mktemp("needlebench"))


def examples(folder: Path, limit: int | None = None, **fields: Any) -> list[Example]:
    return list(replace(TASK, data_dir=str(folder), **fields).examples(CharTokenizer(), 0, limit))


# --- grid ---


def test_the_grids_are_the_released_ones() -> None:
    assert V1["4k"].depths == V1["8k"].depths
    assert V1["4k"].depths[:6] == (0, 5, 10, 15, 21, 26)
    assert V1["32k"].depths == (0, 10, 21, 31, 42, 52, 63, 73, 84, 94, 100)
    assert V1["8k"].lengths == (5000, 6000, 7000, 8000)
    assert V1["32k"].lengths == (9000, 13000, 17000, 21000, 25000, 29000, 31000, 32000)
    english = {size: tuple(V1[size].buffer(kind, "en") for kind in KINDS) for size in V1}
    assert english == {"4k": (600, 1000, 600), "8k": (800, 1300, 1000), "32k": (3000, 3000, 3000)}
    assert {V1[size].buffer(kind, "zh") for size in V1 for kind in KINDS} == {200}


# --- prompts ---


@given(
    size=st.integers(0, 300),
    needles=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    depths=st.lists(st.integers(0, 100), min_size=5, max_size=5),
    spacing=st.integers(0, 40),
)
def test_placing_needles_adds_their_tokens_and_nothing_else(
    size: int, needles: list[int], depths: list[int], spacing: int
) -> None:
    haystack = list(range(size))
    marks = [[-1 - i] * length for i, length in enumerate(needles)]
    placed = [
        (build.place_spaced(haystack, marks[:1], depths[0], spacing), marks[:1]),
        (build.place_at_depths(haystack, marks, sorted(depths)), marks),
        (build.place_spaced(haystack, marks, depths[0], spacing), marks),
    ]
    for whole, hidden in placed:
        assert [token for token in whole if token >= 0] == haystack
        assert Counter(token for token in whole if token < 0) == {mark[0]: len(mark) for mark in hidden}


def test_a_prompt_holds_its_length_and_its_needle_where_the_depth_says(folder: Path) -> None:
    for example in examples(folder, kinds=["single_retrieval"], repeats=2, cells=10):
        needle, keyword = example.references[0].split("*")
        assert example.prompt.count(needle) == 1
        assert keyword in needle
        buffer = 600 if example.metadata["language"] == "en" else 200
        start = "The document given to you by the user is " if buffer == 600 else "用户现在给你的文档是"
        ends = "\n\nNow, the question is: " if buffer == 600 else "\n\n现在请问："
        context = example.prompt.split(start)[1].split(ends)[0]
        room = example.metadata["length"] - buffer
        assert len(context) == room
        assert context.index(needle) == int((room - len(needle)) * example.metadata["depth"] / 100)
        assert TASK.score(f"It is {keyword}.", example) == 1.0
        assert TASK.score("", example) == 0.0


def test_multi_retrieval_hides_and_asks_one_needle_per_depth(folder: Path) -> None:
    for example in examples(folder, kinds=["multi_retrieval"], repeats=2, cells=1, languages=["en"]):
        keywords, depths = (part.split("*") for part in example.references[0].split("#"))
        assert [int(depth) for depth in depths] == list(V1["4k"].depths)
        assert len(set(keywords)) == 20
        places = [example.prompt.index(f"hid the {keyword}.") for keyword in keywords]
        assert places == sorted(places)
        assert TASK.score(", ".join(keywords[:5]), example) == pytest.approx(
            sum(any(keyword in other for other in keywords[:5]) for keyword in keywords) / 20
        )


def test_v2_asks_for_the_eldest_of_a_family_in_a_box(folder: Path) -> None:
    found = examples(folder, v2=True, kinds=["multi_reasoning"], repeats=1, cells=1)
    task = replace(TASK, v2=True)
    for example in found:
        (eldest,) = example.references
        assert eldest in example.prompt
        assert example.prompt.count("\\boxed{}") == 1
        assert "{last_person}" not in example.prompt
        assert "{{" not in example.prompt
        assert task.score(f"So it is \\boxed{{{eldest}}}.", example) == 1.0
        assert task.score(f"So it is {eldest}.", example) == 0.0
    assert (
        {one.depth for one in task.points() if one.depth is not None} == set(V2["4k"].depths) == set(range(0, 101, 10))
    )


# --- runs ---


def test_answers_of_a_run_are_averaged_as_the_official_tables_are(folder: Path) -> None:
    task = replace(TASK, cells=4, repeats=1)
    run = []
    for example in examples(folder, cells=4, repeats=1):
        output = example.references[0] if example.metadata["task"] != "multi_reasoning" else ""
        run.append(Answer(task.score(output, example), dict(example.metadata), example.references, output))
    assert summary(run) == pytest.approx(
        {"single_retrieval": 100.0, "multi_retrieval": 100.0, "multi_reasoning": 0.0, "overall": 70.0}
    )
    assert list(heat_map(run).values()) == pytest.approx([70.0] * 4)
    rows = [answer for answer in run if answer.metadata["task"] == "multi_retrieval"]
    assert len(heat_map(rows)) == 4 * 20
    single = [answer for answer in run if answer.metadata["task"] == "single_retrieval"]
    assert summary(single) == {"single_retrieval": 100.0}
