"""LongProc: official prompts and scores, generated problems, and rows that cannot be used."""

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from task_data import recorded

from kvbench.config.compose import read
from kvbench.config.parts import build
from kvbench.errors import ConfigError
from kvbench.tasks.longproc import countdown, programs, scores
from kvbench.tasks.longproc.task import SIZES, TASKS
from kvbench.tasks.task import Example, Tokenizer

SHARED = Path(__file__).parents[4] / "shared"
DATA = SHARED / "data/longproc"


def task(name: str, **fields: object) -> Any:
    return build({**read("task", f"longproc/{name}"), **fields})


def rows(name: str, tokenizer: Tokenizer) -> tuple[Any, list[Example]]:
    """The task of a set such as countdown_2k, and its examples."""
    own, _, size = name.removesuffix("_few").rpartition("_")
    one = task(own, size=size, data_dir=str(DATA), official=True, allow_code_execution=True)
    return one, list(one.examples(tokenizer, 0))


def test_the_official_prompts_and_references(words: Tokenizer) -> None:
    sets: dict[str, list[Example]] = {}
    for row in recorded("additions2/longproc_prompts.jsonl"):
        examples = sets.setdefault(row["set"], []) or rows(row["set"], words)[1]
        sets[row["set"]] = examples
        example = examples[row["row"]]
        digests = [hashlib.sha256(text.encode()).hexdigest() for text in (example.prompt, *example.references)]
        assert digests == [row["prompt_sha256"], row["reference_sha256"]], (row["set"], row["row"])


@pytest.mark.parametrize(
    "name", [*TASKS[:4], pytest.param("pseudo_to_code", marks=pytest.mark.slow("compiles 20 programs"))]
)
def test_the_official_scores(name: str, words: Tokenizer) -> None:
    if name == "pseudo_to_code" and shutil.which("g++") is None:
        pytest.skip("needs g++")
    sets: dict[str, tuple[Any, list[Example]]] = {}
    for row in (one for one in recorded("additions2/longproc_scores.jsonl") if one["task"] == name):
        if row["set"] not in sets:
            sets[row["set"]] = rows(row["set"], words)
        one, examples = sets[row["set"]]
        score, found = one.judge(row["prediction"], examples[row["row"]])
        if row["raises"] is None:
            assert found == pytest.approx(row["metrics"]), (row["tag"], row["row"])
        else:
            assert score == 0


def test_a_countdown_answer_by_hand() -> None:
    numbers, target = [21, 16, 17, 26], 46
    reference = countdown.reference(numbers, target)
    assert reference.endswith("<Solution>\n21 + 16 = 37\n37 - 17 = 20\n26 + 20 = 46\n</Solution>\n")
    right = "<Solution>\n21 + 16 = 37\n26 - 17 = 9\n37 + 9 = 46\n</Solution>"
    assert scores.countdown_score(right, numbers, target, reference)["accuracy"] == 1
    log = reference.partition("\n\nNow we")[0]
    lines = log.count("\n") - 1
    assert scores.countdown_score(log, numbers, target, reference)["partial_accuracy"] == (lines - 1) / lines
    cut = "\n".join(log.split("\n")[:2])
    assert scores.countdown_score(cut, numbers, target, reference)["partial_accuracy"] == -1 / lines


@pytest.mark.parametrize(
    "text", ["__import__('os').system('touch here')", "(21).__class__", "21 if 1 else 2", "9 ** 9", "21 / 0", "x + 1"]
)
def test_text_of_the_model_is_parsed_and_never_evaluated(text: str, tmp_path: Path, words: Tokenizer) -> None:
    output = f"<Solution>\n{text} = 37\n26 - 17 = 9\n37 + 9 = 46\n</Solution>"
    example = Example(0, "", ("# Search Procedure\nx\ny",), 9, metadata={"nums": [21, 16, 17, 26], "target": 46})
    score, found = task("countdown").judge(output, example)
    assert (score, found["accuracy"]) == (0, 0)
    assert not Path("here").exists()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["countdown", "path_traversal"])
def test_generated_problems_have_one_answer_which_scores_1(name: str, size: str, words: Tokenizer) -> None:
    one = task(name, size=size)
    first, second = one.examples(words, 3, 2)
    assert first.prompt != second.prompt
    assert next(one.examples(words, 3, 1)).prompt == first.prompt
    assert first.prompt.endswith(first.question)
    (reference,) = first.references
    answer = reference if name == "countdown" else f"<Route>\n{reference}\n</Route>"
    assert one.judge(answer, first)[0] == 1
    assert first.max_new_tokens == SIZES[size]
    if name == "path_traversal":
        edges = [line for line in first.prompt.partition("[PROBLEM]")[2].split("\n") if "lively" in line]
        cities = [line.partition(" is a lively")[0] for line in edges]
        assert len(set(cities)) == len(cities) > reference.count("\n") + 1


def test_scores_below_0_are_official_only() -> None:
    example = Example(0, "", ("# Search Procedure\na\nb\nc",), 9, metadata={"nums": [1, 2, 3, 4], "target": 10})
    assert task("countdown").judge("# Search Procedure\na", example)[0] == 0
    assert task("countdown", official=True).judge("# Search Procedure\na", example)[0] == -0.5


def test_a_table_is_compared_by_rows_in_any_order() -> None:
    reference = "name\tprice\nThe Mill\t$3\nA boat\t4"
    found = scores.html_to_tsv("```tsv\nn\tp\nboat\t4\nmill\t3\nsea\t9\n```", reference)
    assert found == pytest.approx({"f1": 0.8, "precision": 2 / 3, "recall": 1, "extraction_rate": 1})
    assert scores.html_to_tsv("```tsv\nname\tprice\n```", reference)["f1"] == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("countdown", [{"nums": [1, 2, 3], "target": 9}], "row 1 is not a row of countdown: nums=.* five whole"),
        ("countdown", [{"nums": [1, 1, 1, 1], "target": 50}], "50 cannot be reached"),
        ("path_traversal", [{"context_nl": "x"}], "no field 'question_repr'"),
        ("tom_tracking", [{"story": 1, "question": "q", "solution": "s"}], "its story is 1, it must be a text"),
        ("html_to_tsv", [{"task_topic": "x"}], "no field 'task_description'"),
        ("pseudo_to_code", [{"testcases": []}], "testcases must be pairs"),
        ("tom_tracking", {"a": 1}, "no field 'story'"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    name: str, content: object, said: str, tmp_path: Path, words: Tokenizer
) -> None:
    (tmp_path / f"{name}_0.5k.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{name}_0.5k.json.*{said}"):
        list(task(name, data_dir=str(tmp_path), allow_code_execution=True).examples(words, 0))


def test_missing_data_and_permissions_are_named(tmp_path: Path, words: Tokenizer) -> None:
    for fields, said in (
        ({"task": "tom_tracking"}, r"data_dir=null is not allowed for tom_tracking: download https"),
        ({"task": "tom_tracking", "data_dir": str(tmp_path)}, r"has no tom_tracking_0\.5k\.json"),
        ({"task": "pseudo_to_code"}, r"compiles and runs C\+\+"),
    ):
        with pytest.raises(ValueError, match=said):
            list(task("countdown", **fields).examples(words, 0))
    with pytest.raises(ValueError, match=r"size=.8k. does not exist for pseudo_to_code"):
        task("pseudo_to_code", size="8k")


@pytest.mark.slow("compiles two programs")
def test_a_program_is_compiled_and_run_only_when_that_is_allowed(words: Tokenizer) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    example = Example(0, "", ("",), 9, metadata={"testcases": [[["1 2"], ["3"]], [["4 5"], ["9"]]]})
    program = "```c++\nint main() { int a, b; cin >> a >> b; cout << a + b << endl; }\n```"
    assert task("pseudo_to_code", allow_code_execution=True).judge(program, example)[0] == 1
    endless = "```cpp\nint main() { while (true) {} }\n```"
    assert task("pseudo_to_code", allow_code_execution=True).judge(endless, example)[0] == 0
    with pytest.raises(ValueError, match="allow_code_execution"):
        task("pseudo_to_code").judge(program, example)


DETACHED = """```cpp
#include <unistd.h>
#include <signal.h>
int main() {{
    int number;
    cin >> number;
    if (!fork()) {{
        setsid();
        signal(SIGTERM, SIG_IGN);
        signal(SIGHUP, SIG_IGN);
        if (!fork()) while (true) {{ ofstream("{mark}") << getpid(); usleep(20000); }}
        _exit(0);
    }}
    usleep(400000);
    {end}
}}
```"""


@pytest.mark.slow("compiles two programs, one of which runs to its time limit")
@pytest.mark.parametrize("end", ["while (true) {}", "cout << number;"], ids=["at the limit", "after the answer"])
def test_no_process_of_a_program_outlives_it(end: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    mark = tmp_path / "mark"
    example = Example(0, "", ("",), 9, metadata={"testcases": [[["1"], ["1"]]]})
    program = DETACHED.format(mark=mark, end=end)
    score, _ = task("pseudo_to_code", allow_code_execution=True).judge(program, example)
    assert score == ("cout" in end)
    assert mark.exists(), "the detached process ran"
    mark.unlink()
    time.sleep(0.2)
    assert not mark.exists()


def test_programs_are_refused_where_they_could_outlive_their_limit(
    words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "ISOLATED", ("no-such-program",))
    programs.check_isolation.cache_clear()
    with pytest.raises(ConfigError, match=r"could outlive its time limit.*no-such-program"):
        list(task("pseudo_to_code", allow_code_execution=True).examples(words, 0))
    programs.check_isolation.cache_clear()
