"""Invented rows of SCBench's twelve tasks, in the form of its data set."""

import json
from pathlib import Path
from typing import Any

CODE = {"lang": "python", "repo": "a/b"}
SPIN = {"input": "Which joins?", "answer": "def spin(x):\n    return x + 1", "name": "spin", "task": "scbench_repoqa"}
MEND = {"input": "Which cuts?", "answer": "def mend(y, z):\n    return y[z:]", "name": "mend", "task": "scbench_repoqa"}
KEY = {"input": 'Key: "ab"\nIts value: ', "answer": "7c41", "task": "scbench_kv"}
SUMMARY = {"input": "Summarise paper 1.", "answer": "It rained.", "task": "scbench_summary"}
NEEDLE = {"input": "What is the number?", "answer": "71482", "task": "scbench_passkey"}
FOUR = {"options": ["one", "two", "mill", "four"]}


def _turns(*turns: tuple[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"input": asked, "answer": answer, **more} for asked, answer in turns]


ROWS: dict[str, dict[str, Any]] = {
    "kv": {
        "context": '{"ab": "7c41", "cd": "90e2", "ef": "5b0a"}',
        "multi_turns": _turns(('Key: "ab"\nIts value: ', "7c41"), ('Key: "cd"\nIts value: ', "90e2"), ("ef?", "5b0a")),
    },
    "prefix_suffix": {"context": "abxyz\nqrstu", "multi_turns": _turns(("ab, yz?", "abxyz"), ("qr, tu?", "qrstu"))},
    "vt": {"context": "VAR A = 1\nVAR B = A", "multi_turns": _turns(("Which are 1?", ["A", "B"]), ("And 2?", ["Q"]))},
    "repoqa": {"context": "# code", "multi_turns": [{**SPIN, "task": None}, {**MEND, "task": None}], **CODE},
    "qa_eng": {"context": "Ada is old.", "multi_turns": _turns(("Who is old?", "Ada"), ("Is she?", "Yes"))},
    "qa_chn": {"context": "银杏湖", "multi_turns": _turns(("哪里?", "湖"), ("什么?", "银"))},
    "choice_eng": {"context": "The mill.", "multi_turns": _turns(("What?", "mill"), ("Which?", "two"), **FOUR)},
    "many_shot": {"context": "(A) or (B)", "multi_turns": _turns(("Which?", "(A)"), ("And now?", "(B)"))},
    "summary": {"context": "It rained and rained.", "multi_turns": _turns(("Paper 1?", "It rained"), ("2?", "rained"))},
    "mf": {"context": [42, 7], "multi_turns": _turns(("The largest number is", 42), ("The smallest number is", 7))},
    "summary_with_needles": {"context": "It rained. 71482.", "multi_turns": [SUMMARY, NEEDLE]},
    "repoqa_and_kv": {"context": "# code", "multi_turns": [SPIN, KEY, MEND], **CODE},
}


def write(folder: Path, *names: str, contexts: int = 1) -> Path:
    """A file for each task, with the same turns about so many contexts."""
    for name in names or ROWS:
        row = ROWS[name]
        lines = [json.dumps({"id": n, **row, "context": _numbered(row["context"], n)}) + "\n" for n in range(contexts)]
        (folder / f"scbench_{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _numbered(context: Any, number: int) -> Any:
    return f"{context} {number}" if number else context
