"""A wrong field of a task and a wrong file of its data: one message with the name and what is expected."""

import re
from pathlib import Path

import pytest
import task_data
from char_tokenizer import CharTokenizer
from task_data import build

WRONG = [
    ("niah", "lengths=1024", "lengths=1024 is not allowed, it must be a list"),
    ("niah", "frame='{context}'", "frame="),
    ("niah", "queries=2", "queries=2 is more than the keys=1"),
    ("niah_text", "answer=' '", "answer=' ' is not a part of needle="),
    ("niah", "truncation=right", "truncation must be refuse, middle or left, got 'right'"),
    ("niah", "stop=['']", "is not allowed"),
    ("arithmetic", "high=10", "high must be a whole number of at least 11, got 10"),
    ("arithmetic", "operation=product", "operation must be sum, difference or both, got 'product'"),
    ("math500", "chat_template_args=3", "chat_template_args must be fields, such as {enable_thinking: false}, got 3"),
    ("math500", "think_end=''", "think_end must be a text, such as </think>, or null"),
    (
        "math500",
        "think_end='Answer:'",
        "is not the end of a known thought: name the text that begins it, task.think_begin=",
    ),
    ("math500", "think_begin='</think>'", "think_begin='</think>' is not allowed, it must differ from think_end"),
    ("math500", "protocol=authors", "protocol must be sound or kvpress, got 'authors'"),
    ("ruler/niah_single_1", "haystack=book", "haystack must be noise, needle or essay, got 'book'"),
    ("ruler/niah_single_1", "keys=26", "make more needles than the 25 lines"),
    ("ruler/vt", "hops=10", "hops=10 is too long for ruler_vt, at most 9"),
    ("ruler/cwe", "common=11", "common=11 is too large"),
    ("ruler_file", "task=niah", "task must be niah_single_1"),
    ("needlebench/4k", "size=2k", "size must be 4k, 8k or 32k, got '2k'"),
    ("needlebench/4k", "cells=0", "cells must be a whole number of at least 1, got 0"),
]


@pytest.mark.parametrize(("name", "field", "message"), WRONG, ids=[f"{name} {field}" for name, field, _ in WRONG])
def test_a_wrong_field_is_refused_with_its_name_and_value(name: str, field: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(name, f"task.{field}")


ASKED = '{"context": "c", "question": "q", "answers": ["a"], "max_new_tokens": 1}\n'
FILES: list[tuple[str, str, str | None, str]] = [  # content None: the file is missing
    ("longbench/qasper", "qasper.jsonl", '{"context": "a"}', "qasper.jsonl, row 1: no text in its field 'input'"),
    (
        *("longbench/qasper", "qasper.jsonl", '{"context": "a", "input": "", "answers": "b", "length": 1}'),
        "answers is 'b'",
    ),
    ("needlebench/4k", "needles.jsonl", '{"needle": "a"}', "row 1: no text in its field 'retrieval_question'"),
    (
        *("needlebench/4k", "multi_needle_reasoning_en.json", '[{"question": "", "answer": "", "derivations": ["a"]}]'),
        "has no entry with derivation_count 2",
    ),
    ("ruler/qa_1", "dev-v2.0.json", "[", "dev-v2.0.json is damaged or has another format (JSONDecodeError"),
    ("ruler/qa_1", "dev-v2.0.json", "{}", "is damaged or has another format (KeyError: 'data')"),
    ("ruler/qa_1", "dev-v2.0.json", '{"data": []}', "has no questions"),
    ("ruler/qa_2", "hotpot_dev_distractor_v1.json", None, "has no hotpot_dev_distractor_v1.json"),
    ("scbench/kv", "scbench_kv.jsonl", None, "it must have files such as scbench_kv.jsonl"),
    ("scbench/kv", "scbench_kv.jsonl", '{"context": "a"}', "microsoft/SCBench"),
    ("loogle/shortdep_qa", "shortdep_qa.json", None, "has no shortdep_qa.jsonl"),
    (*("loogle/shortdep_qa", "shortdep_qa.json", '[{"input": "a", "qa_pairs": "{"}]'), "bigai-nlco/LooGLE"),
    (
        *("longbench/qasper", "qasper.jsonl", '{"context": "a", "input": "", "answers": ["b", ""], "length": 1}'),
        "qasper.jsonl, row 1: answers: '' in ['b', ''] is an empty text, which every output would contain",
    ),
    ("math500", "test.jsonl", '{"problem": "a", "answer": ""}', "test.jsonl, row 1: answer: '' is an empty text"),
    (
        *("loogle/shortdep_qa", "shortdep_qa.json", '[{"input": "a", "qa_pairs": [{"Q": "b", "A": " "}]}]'),
        "shortdep_qa.json, row 1: unexpected format, expected the format of bigai-nlco/LooGLE (references: ' ' is an",
    ),
    (
        *("infinitebench/kv_retrieval", "kv_retrieval.jsonl", '{"context": "a", "input": "b", "answer": ""}'),
        "kv_retrieval.jsonl, row 1: unexpected format",
    ),
    (
        *("scbench/kv", "scbench_kv.jsonl", '{"context": "a", "multi_turns": [{"input": "b", "answer": ""}]}'),
        "(ValueError: answer: '' is an empty text, which every output would contain)",
    ),
    (
        "longproc/tom_tracking",
        "tom_tracking_0.5k.json",
        '[{"story": "a", "question": "b", "solution": ""}]',
        "tom_tracking_0.5k.json, row 1 is not a row of tom_tracking: its reference: '' is an empty text",
    ),
    ("context_question", "rows.jsonl", ASKED + ASKED.replace('["a"]', "null"), "row 2: neither answers nor answer"),
    ("context_question", "rows.jsonl", ASKED.replace(": 1}", ": 0}"), "max_new_tokens is 0, it must be an integer"),
    ("context_question", "rows.jsonl", ASKED.replace(": 1}", ": null}"), "no max_new_tokens, set task.max_new_tokens"),
]


@pytest.mark.parametrize(("name", "file", "content", "message"), FILES)
def test_a_wrong_file_is_refused_with_its_name(
    name: str, file: str, content: str | None, message: str, tmp_path: Path
) -> None:
    folder = tmp_path
    if name.startswith(("ruler", "needlebench")):
        task_data.write(tmp_path)
    if content is None:
        (tmp_path / file).unlink(missing_ok=True)
    else:
        (tmp_path / file).write_text(content, encoding="utf-8")
    if name == "context_question":
        folder = tmp_path / file
    small = ["counted_in=model", "languages=[en]", "cells=1", "repeats=1"] if name.startswith("needlebench") else []
    task = build(name, f"task.data_dir={folder}", *(f"task.{one}" for one in small))
    with pytest.raises(ValueError, match=re.escape(message)):
        list(task.examples(CharTokenizer(), 0))
