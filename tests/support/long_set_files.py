"""Invented rows of the public long sets, in the form of their authors and in the columns of kvpress's data sets."""

import json
import zipfile
from pathlib import Path
from typing import Any

CHOSEN = {"options": ["one", "two", "mill", "four"], "answer": ["mill"]}
INFINITEBENCH: dict[str, dict[str, Any]] = {
    "passkey": {"context": "The pass key is 71482.", "input": "What is the pass key?", "answer": ["71482"]},
    "number_string": {"context": "It is 2200.", "input": "What is the sequence of digits?", "answer": ["2200"]},
    "kv_retrieval": {"context": '{"a": "7c41"}', "input": 'Key: "a"\nThe value is: ', "answer": ["7c41"]},
    "code_run": {"context": "def func_1(x): return -37", "input": "Give the value of func_1(-4).", "answer": [-37]},
    "code_debug": {"context": "def mill(): pass", "input": "Which function?", **CHOSEN},
    "longbook_choice_eng": {"context": "The mill.", "input": "What?", **CHOSEN},
    "longdialogue_qa_eng": {"context": "ACE: hello $$MASK$$", "input": "Who?", "answer": ["ACE", "ACE ROTH"]},
    "longbook_qa_eng": {"context": "Ada is old.", "input": "Who is old?", "answer": ["Ada"]},
    "longbook_qa_chn": {"context": "银杏湖", "input": "哪里?", "answer": ["银杏湖"]},
    "longbook_sum_eng": {"context": "It rained and rained.", "input": "", "answer": ["It rained"]},
    "math_find": {"context": "[42, 7]", "input": "The second largest number of the list is:", "answer": [42]},
    "math_calc": {"context": "1 + 3 + 4 = 8", "input": "", "answer": [1, 4, 8]},
}
LOOGLE: dict[str, dict[str, Any]] = {
    "shortdep_qa": {"input": "Ada is old.", "qa_pairs": str([{"Q": "Who?", "A": "Ada is old.", "S": []}])},
    "longdep_qa": {"input": "Ada is old.", "qa_pairs": [{"Q": "Who?", "A": "Ada is old."}, {"Q": "2", "A": "3"}]},
    "shortdep_cloze": {"input": "Ada.", "qa_pairs": str([{"Q": "<mask-0> is", "A": {"<mask-0>": "Ada"}}])},
    "longdep_summarization": {"input": "It rained.", "qa_pairs": "none", "output": "It rained."},
}
LONGBENCH_V2 = {
    "_id": "1",
    "domain": "Code",
    "difficulty": "hard",
    "length": "short",
    "answer": "C",
    "context": " The mill. ",
    "question": " What? ",
    "choice_A": "a",
    "choice_B": "b ",
    "choice_C": "mill",
    "choice_D": "d",
}
ZERO_SCROLLS = {
    "id": "q1",
    "input": "Read.\n\nStory:\nIt rained.\n\nQuestion:\nWhat?\n\nAnswer:\n",
    "document_end_index": 24,
}


def write_authors(folder: Path) -> Path:
    """All sets as their authors have them, the first of zero_scrolls as a .zip file."""
    for name, row in {**INFINITEBENCH, **LOOGLE}.items():
        (folder / f"{name}.jsonl").write_text(json.dumps({"options": [], **row}) + "\n", encoding="utf-8")
    (folder / "data.json").write_text(json.dumps([LONGBENCH_V2]), encoding="utf-8")
    with zipfile.ZipFile(folder / "gov_report.zip", "w") as archive:
        archive.writestr("gov_report/test.jsonl", json.dumps(ZERO_SCROLLS))
    for name in ("qasper", "quality"):
        (folder / name).mkdir()
        (folder / name / "test.jsonl").write_text(json.dumps(ZERO_SCROLLS), encoding="utf-8")
    return folder


def write_kvpress(folder: Path, name: str, **columns: Any) -> Path:
    """One configuration of kvpress's, with a single row."""
    row = {"context": "Read: the mill.\n\n", "question": "Which?\n", "answer_prefix": "It is", "max_new_tokens": 26}
    (folder / f"{name}.jsonl").write_text(json.dumps({**row, **columns}) + "\n", encoding="utf-8")
    return folder
