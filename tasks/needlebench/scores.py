"""NeedleBench's scorers, 0 to 100, on a raw prediction and its gold string.

Source: open-compass/opencompass at a5acc4b, opencompass/datasets/needlebench/{origin,parallel,multi}.py, as they were
from March 2024 until they were marked deprecated in June 2025; v2: opencompass/datasets/needlebench_v2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

from kvbench.tasks.scores import up_to_brace
from kvbench.tasks.task import check_references


def single_retrieval(prediction: str, gold: str, v2: bool = False) -> float:
    """100 if the prediction contains the keyword; otherwise, in v1, up to 20 for similarity to the needle.

    gold: needle, "*", keyword. Similarity: share of the longer text's characters that need no edit, without white
    space. Raises ValueError if gold has no "*". As in the official code, a "*" in the needle shifts the keyword.
    """
    needle, keyword = _parted(gold, "*", "needle*keyword")[:2]
    check_references([keyword], f"the keyword of {gold!r:.60}")
    if keyword in prediction:
        return 100.0
    if v2:
        return 0.0
    output, wanted = _no_space(prediction), _no_space(needle)
    longer = max(len(output), len(wanted))
    return 0.2 * (100 * (1 - edit_distance(output, wanted) / longer) if longer else 100)


def multi_retrieval(predictions: Sequence[str], golds: Sequence[str]) -> dict[int, float]:
    """Percent of the predictions that have the keyword of each depth.

    golds: keywords joined by "*", "#", depths joined by "*"; the depths of the first are used for all. As in the
    official code, a depth that occurs twice collects the points of both keywords.
    """
    written = _parted(golds[0], "#", "keywords#depths")[1].split("*")
    if not all(depth.isdecimal() for depth in written):
        raise ValueError(f"reference {golds[0]!r} has depths that are not whole numbers")
    depths = [int(depth) for depth in written]
    found = dict.fromkeys(depths, 0.0)
    for prediction, gold in zip(predictions, golds, strict=True):
        check_references(gold.split("#")[0].split("*"), f"the keywords of {gold!r:.60}")
        for keyword, depth in zip(gold.split("#")[0].split("*"), depths, strict=False):
            if keyword in prediction:
                found[depth] += 100 / len(predictions)
    return found


def multi_reasoning(prediction: str, gold: str) -> float:
    """Percent of the words of the answer that occur in the prediction, ignoring case. gold: answer, "*", answer.

    A Chinese answer is one word. An answer without words scores 0.
    """
    words = _parted(gold, "*", "answer*answer")[1].lower().split()
    return 100 / len(words) * sum(word in prediction.lower() for word in words) if words else 0.0


def boxed_answer(prediction: str, gold: str) -> float:
    """v2's multi reasoning: 100 if the last \\boxed{} has the name, without LaTeX and quotes."""
    return 100.0 if _boxed(prediction) == gold.strip() else 0.0


def mean_over_depths(found: dict[int, float]) -> float:
    """The overall score of multi retrieval."""
    return fmean(found.values())


def edit_distance(first: str, second: str) -> int:
    """Levenshtein distance: insertions, deletions and substitutions of a character cost 1."""
    before = list(range(len(second) + 1))
    for i, mark in enumerate(first, start=1):
        row = [i]
        for j, other in enumerate(second, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (mark != other)))
        before = row
    return before[-1]


def _no_space(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _parted(gold: str, mark: str, form: str) -> list[str]:
    parts = gold.split(mark)
    if len(parts) < 2:
        raise ValueError(f"reference {gold!r} does not have the format {form}")
    return parts


def _boxed(prediction: str) -> str | None:
    """The content of the last \\boxed{...}, with balanced braces; None without one."""
    _, box, rest = prediction.rpartition("\\boxed{")
    inside = up_to_brace(rest) if box else None
    return None if inside is None else _clean(inside)


def _clean(text: str) -> str:
    """The name in a box, without outer braces, \\text{}, backslashes, quotes and extra spaces."""
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r"\\text\{([^}]+)\}", r"\1", text).replace("\\[", "").replace("\\]", "").replace("\\", "")
    return re.sub(r"\s+", " ", text).strip().replace('"', "").replace("'", "").replace("~", " ").strip()
