"""Invented essays and question files in the official formats of RULER."""

import json
from pathlib import Path
from typing import Any

ARTICLES, PARAGRAPHS = 30, 5


def write(folder: Path) -> Path:
    """The folder, filled: two essays, SQuAD's and HotpotQA's dev files, one line of RULER's own output."""
    for name in ("a", "b"):
        (folder / f"essay_{name}.txt").write_text("\n\n".join(_essay(name, i) for i in range(60)), encoding="utf-8")
    line = {"input": "It is 7. What is it?", "answer_prefix": " The special magic uuid is", "outputs": ["7"]}
    (folder / "recorded.jsonl").write_text(json.dumps(line), encoding="utf-8")
    (folder / "dev-v2.0.json").write_text(json.dumps(squad()), encoding="utf-8")
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpotqa()), encoding="utf-8")
    return folder


def squad() -> dict[str, Any]:
    """Thirty articles of five paragraphs, each with a question that can be answered and one that cannot."""
    return {"data": [{"paragraphs": [_paragraph(a, p) for p in range(PARAGRAPHS)]} for a in range(ARTICLES)]}


def hotpotqa() -> list[dict[str, Any]]:
    """Forty questions with ten documents each."""
    return [
        {
            "question": f"Whose house is number {q}?",
            "answer": f"Owner {q}",
            "supporting_facts": [[f"House {q} room {d}", 1] for d in (2, 5, 5)],
            "context": [
                [f"House {q} room {d}", ["This room is cold. ", f"Owner {q} sleeps in it. "]] for d in range(10)
            ],
        }
        for q in range(40)
    ]


def _paragraph(a: int, p: int) -> dict[str, Any]:
    text = f"Article {a} paragraph {p} tells of the village of Num{a}x{p}. " + "The rest is about rain. " * 6
    asked = {"question": f"Which village has paragraph {p} of article {a}?", "is_impossible": False}
    answers = [{"text": f"Num{a}x{p}"}, {"text": f"village of Num{a}x{p}"}]
    return {
        "context": text,
        "qas": [{**asked, "answers": answers}, {"question": "Why?", "is_impossible": True, "answers": []}],
    }


def _essay(name: str, i: int) -> str:
    return f"Essay {name} goes on with thought {i}. Is it a long one? It is! Some people think so; others do not."
