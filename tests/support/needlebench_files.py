"""Invented files in the official formats of NeedleBench."""

import json
from pathlib import Path


def write(folder: Path, lines: int = 40) -> Path:
    """The folder, filled: haystacks of `lines` lines, 25 needles a language, reasoning entries, names."""
    _jsonl(folder / "PaulGrahamEssays.jsonl", [{"text": _english(i)} for i in range(lines)])
    _jsonl(
        folder / "zh_finance.jsonl", [{"text": f"第{i}号公司今年收入增长，去年收入下降。" * 9} for i in range(lines)]
    )
    _jsonl(folder / "needles.jsonl", [needle for i in range(25) for needle in _needles(i)])
    for language, entry in (("en", _entry_en), ("zh", _entry_zh)):
        entries = [entry(count, i) for count in (2, 3, 4, 5) for i in range(4)]
        text = json.dumps(entries, ensure_ascii=False)
        (folder / f"multi_needle_reasoning_{language}.json").write_text(text, encoding="utf-8")
    names = {
        "English": ",".join(f"Person {mark}" for mark in "ABCDEFGHIJ"),
        "Chinese": "王一,李二,张三,赵四,钱五,孙六,周七",
    }
    (folder / "names.json").write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
    return folder


def _jsonl(path: Path, entries: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in entries), encoding="utf-8")


def _english(i: int) -> str:
    return f"Line {i} tells of quiet harbours and slow trains. " * 12 + "\n"


def _needles(i: int) -> tuple[dict[str, str], dict[str, str]]:
    english = {
        "needle": f"In the cellar of house {i}, Nell hid the Copper Crown {i}.",
        "retrieval_question": f"What did Nell hide in the cellar of house {i}? "
        f"Please answer in the format 'In the cellar of house {i} lies ____.'",
        "arg1": f"house {i}",
        "arg2": f"Copper Crown {i}",
        "language": "English",
    }
    chinese = {
        "needle": f"第{i}号信使最喜欢的地方是第{i}号湖。",
        "retrieval_question": f"第{i}号信使最喜欢的地方是哪里？请按照'第{i}号信使最喜欢的地方是____。'的格式回答。",
        "arg1": f"第{i}号信使",
        "arg2": f"第{i}号湖",
        "language": "Chinese",
    }
    return english, chinese


def _entry_en(count: int, i: int) -> dict[str, object]:
    told = [f"Fact {n} of {count} about group {i}." for n in range(count)]
    return {"derivation_count": count, "derivations": told, "question": "Who is it?", "answer": f"Ada Vance {i}"}


def _entry_zh(count: int, i: int) -> dict[str, object]:
    told = [f"第{i}组的第{n}个事实，共{count}个。" for n in range(count)]
    return {"derivation_count": count, "derivations": told, "question": "是谁？", "answer": f"老{i}"}
