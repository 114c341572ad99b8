"""Every yaml under conf/task is composed and built, and asks something."""

import json
from pathlib import Path

import pytest
import task_data
from char_tokenizer import CharTokenizer
from task_data import build

from kvbench.config.compose import names
from kvbench.tasks.hub import HubFile
from kvbench.tasks.longbench.subsets import EXTENDED, PAPER_SETS
from kvbench.tasks.longbench.task import LongBench, LongBenchSuite
from kvbench.tasks.task import Tokenizer

NAMES = names("task")

# What a task needs to be built from invented files, by the start of its name.
ESSAYS = [f"ruler/niah_{name}" for name in ("single_2", "single_3", "multikey_1", "multivalue", "multiquery")]
READS_DATA = ("longbench", "needlebench", "ruler/qa", "ruler_13", *ESSAYS)
READS_ALOUD = ("perplexity", "pg19", "booksum")  # tokens are given and scored: there are no answers
OF_LM_EVAL = ("lm_eval", "aime24", "aime25", "gsm8k")  # its prompts and scores are not ours
WORKS_OUT = ("arithmetic",)  # its answers stand nowhere in the text
LONG_SETS = ("infinitebench/", "loogle/", "longbench_v2", "scbench/", "zero_scrolls/")  # see test_long_sets.py
LONG_SETS += ("math500",)  # see math/test_task.py
LONG_SETS += ("longproc/",)  # see longproc/test_longproc.py
LONG_SETS += ("instructions", "ifbench")  # see instructions/test_instructions.py
IN_MODEL_TOKENS = ["task.counted_in=model"]  # the encoding of NeedleBench is a download


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_data.write(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in (*READS_ALOUD, *OF_LM_EVAL) and not name.startswith(LONG_SETS)]
)
def test_every_config_builds_a_task_that_asks(name: str, pieces: Tokenizer, data_dir: Path) -> None:
    given = [f"task.data_dir={data_dir}"] if name.startswith(READS_DATA) else []
    given += [f"task.path={data_dir}/recorded.jsonl"] if name == "ruler_file" else []
    given += [f"task.data_dir={data_dir}/asked.jsonl"] if name == "context_question" else []
    task = build(name, *given, *(IN_MODEL_TOKENS if name.startswith("needlebench") else []))
    assert task.name == name.replace("/", "_")
    example = next(task.examples(CharTokenizer() if name.startswith("needlebench") else pieces, 0))
    reference = example.references[0].split("*")[0]  # NeedleBench's is "needle*keyword"
    assert (reference in example.prompt + example.dictated) or name in WORKS_OUT
    assert example.prompt.endswith(example.question)
    assert task.score(" ".join(example.references), example) == pytest.approx(1.0)
    assert task.score("§§§", example) == 0.0


@pytest.mark.parametrize("name", READS_ALOUD)
def test_every_config_without_answers_builds_a_task_that_gives_tokens(
    name: str, pieces: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test.csv").write_text("chapter,summary_text\nIt rained.,Rain.\n", encoding="utf-8")
    for file in ("test/10146.txt", "own.txt"):
        (tmp_path / file).write_text("It rained.", encoding="utf-8")
    task = build(name, f"task.data_dir={tmp_path}")
    assert task.name == name
    example = next(task.examples(pieces, 0))
    assert example.prompt.startswith("It rained.")
    assert example.reading is not None
    assert (example.target, example.max_new_tokens > 0) == (("Rain.", True) if name == "booksum" else (None, False))


def test_the_suites_of_longbench_are_the_sets_that_papers_average() -> None:
    suite, extended = build("longbench"), build("longbench_e")
    assert isinstance(suite, LongBenchSuite)
    assert isinstance(extended, LongBenchSuite)
    assert tuple(suite.tasks) == PAPER_SETS
    assert tuple(extended.tasks) == EXTENDED
    for name, task in extended.tasks.items():
        assert isinstance(task, LongBench)
        assert (task.subset, task.extended) == (name, True)
        assert isinstance(task.archive, HubFile)
        assert (len(task.archive.revision), len(str(task.archive.sha256))) == (40, 64)


def test_the_config_of_lm_eval_asks_lm_eval_s_task(tmp_path: Path) -> None:
    rows = [{"question": "1 + 1?", "answer": "It is 2.\n#### 2"}]
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps(rows[0]), encoding="utf-8")
    task = build("lm_eval", f"task.data_dir={tmp_path}", "task.num_fewshot=0")
    (example,) = task.examples(CharTokenizer(), 0)
    assert example.prompt == "Question: 1 + 1?\nAnswer:"
    assert task.judge("#### 2", example)[0] == 1.0
    assert task.score("2", example) == 0.0
