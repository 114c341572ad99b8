"""SCBench's scores by hand; the recorded official scores are in tests/kvbench/test_score.py."""

from typing import Any

import pytest
from task_data import recorded

from kvbench.tasks.scbench.predictions import score_predictions
from kvbench.tasks.scbench.repoqa import function_of, most_similar


def row(prediction: str, answer: str, turn: int = 0, **more: str) -> dict[str, Any]:
    return {"prediction": prediction, "ground_truth": answer, "turn_idx": turn, **more}


def test_a_wrong_letter_in_parentheses_scores_1_but_not_in_the_sound_score() -> None:
    line = {"task": "scbench_many_shot", "prediction": "(A)", "references": "(B)"}
    assert score_predictions(line) == {"score": 1.0, "score_sound": 0.0}


def test_the_values_of_repoqa_and_kv_in_scdq_are_always_0_but_in_the_sound_score() -> None:
    code = {"task": "scbench_repoqa", "lang": "python", "repo": "a/b", "func_name": "f"}
    rows = [row("def f(x): return x + 1", "def f(x): return x + 1", **code), row("7", "7", task="scbench_kv")]
    found = score_predictions({"task": "scbench_repoqa_and_kv", "mode": "scdq", "rows": rows})
    assert (found["score"], found["score_sound"]) == ([100.0, 0.0], [100.0, 100.0])
    assert found["columns"] == ["all turns, scbench_repoqa", "all turns, scbench_kv"]


def test_every_recorded_function_is_as_like_as_in_the_official_code() -> None:
    for case in (one for one in recorded("scbench_scores.jsonl") if "best_target" in one):
        name, likeness = most_similar(case["prediction"], case["lang"], case["needles"])
        assert (name, likeness) == (case["best_target"], pytest.approx(case["best_similarity"])), case["id"]


@pytest.mark.parametrize(
    ("lang", "code", "function"),
    [
        ("python", "import a\n@b\ndef f(x,\n  y):\n    return 1\n\nz = 1", "def f(x,\n  y):\n    return 1"),
        ("python", "class A:\n  async def f(x):\n    return 1\n  def g(): pass", "async def f(x):\n    return 1"),
        (
            "java",
            'class A { }\npublic int f(int x) { return "}".length(); }\n//',
            'public int f(int x) { return "}".length(); }',
        ),
        (
            "go",
            "package a\nfunc F(x int) int {\n\tif x > 1 { return 1 }\n}\nfunc G() {}",
            "func F(x int) int {\n\tif x > 1 { return 1 }\n}",
        ),
        ("rust", "use a;\nimpl A {\n  pub fn f(&self) -> u8 { 1 }\n}", "pub fn f(&self) -> u8 { 1 }"),
        ("typescript", "export function f(a: number): void {\n}\nf(1)", "function f(a: number): void {\n}"),
        (
            "cpp",
            "#include <a>\nstd::string f(const int& x) {\n return a(x); }\nint y;",
            "std::string f(const int& x) {\n return a(x); }",
        ),
        ("python", "x = 1\n", "x = 1\n"),
    ],
)
def test_the_first_function_of_a_block_equals_tree_sitter(lang: str, code: str, function: str) -> None:
    assert function_of(f"Here:\n```{lang}\n{code}\n```", lang).rstrip() == function.rstrip()
