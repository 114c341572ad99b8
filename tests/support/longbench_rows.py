"""Invented rows in the official format of LongBench: two of every subset, and of every subset of LongBench-E."""

import json
from pathlib import Path
from typing import Any

# subset: question or few-shot item, answer, labels
_ASKED: dict[str, tuple[str, str, list[str] | None]] = {
    "narrativeqa": ("Who kept the lamp?", "Old Ferrin", None),
    "qasper": ("Which corpus is used?", "the harbour corpus", None),
    "multifieldqa_en": ("Where is the mill?", "by the weir", None),
    "multifieldqa_zh": ("灯塔在哪里？", "灯塔在北岸", None),
    "hotpotqa": ("Who built the bridge that burned?", "Mara Holt", None),
    "2wikimqa": ("Who is older?", "Ivo Lang", None),
    "musique": ("In which town was the author born?", "Quillby", None),
    "dureader": ("如何保存茶叶？", "放在干燥的地方", None),
    "gov_report": ("", "The report finds that the canal needs repair", None),
    "qmsum": ("What was decided?", "The group moved the launch to May", None),
    "multi_news": ("", "Two towns agree to share one ferry", None),
    "vcsum": ("", "会议决定五月修桥", None),
    "trec": ("Question: How far is the moon?\nType:", "Distance", ["Distance", "Dist", "Colour"]),
    "triviaqa": ("Passage:\nA river.\nQuestion:\nWhich river?\nAnswer:", "the Orre", None),
    "samsum": ("Dialogue: A: Tea? B: Yes.\nSummary: ", "A and B will have tea", None),
    "lsht": ("新闻内容：球队赢了\n类别：", "体育", ["体育", "经济"]),
    "passage_count": ("", "7", None),
    "passage_retrieval_en": ("A text about bees.", "Paragraph 12", None),
    "passage_retrieval_zh": ("关于蜜蜂的摘要", "段落3", None),
    "lcc": ("", "    return total / count", None),
    "repobench-p": ("def mean(values):\n", "    return sum(values) / len(values)", None),
}
_NOT_EXTENDED = {"narrativeqa", "musique", "qmsum", "dureader", "vcsum", "lsht"}
EXTENDED = tuple(name for name in _ASKED if name not in _NOT_EXTENDED and not name.endswith("_zh"))


def row(subset: str, index: int = 0) -> dict[str, Any]:
    """A row of a subset. Its context holds braces, which no template may take for its own."""
    asked, answer, labels = _ASKED[subset]
    return {
        "input": asked,
        "context": f"Line {index} of a {{context}} with {{braces}}. " * 3 + answer,
        "answers": [answer],
        "length": 3999 + index,
        "dataset": subset,
        "language": "zh" if any(ord(mark) > 0x4E00 for mark in answer) else "en",
        "all_classes": labels,
        "_id": f"{subset}-{index}",
    }


def write(folder: Path) -> Path:
    """The folder, filled with `<subset>.jsonl` and `<subset>_e.jsonl`, two rows each."""
    for name in [*_ASKED, *(f"{subset}_e" for subset in EXTENDED)]:
        lines = [json.dumps(row(name.removesuffix("_e"), index), ensure_ascii=False) for index in (0, 1)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
