"""Metrics of one output by name, 0 to 1, as used by the public long-context sets."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvbench.tasks.longbench import metrics as longbench
from kvbench.tasks.scores import NUMBER, best, chosen_letter, contains, contains_any, needle_words, rouge1_recall

_CHOSEN = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))

FORMS = {
    "first_number": (re.compile(rf"\s*({NUMBER.pattern})\s*"), "a number without a sign, such as 42"),
    "last_letter": (re.compile("[A-J]"), "a letter from A to J"),
    "correct_choice": (re.compile("[A-D]"), "a letter from A to D"),
}
"""What an answer must be so that a metric can find it."""

Metric = Callable[[str, tuple[str, ...]], float]


def exact_match(output: str, references: tuple[str, ...]) -> float:
    """1.0 if the output equals one of the references, ignoring case and surrounding white space."""
    return float(output.strip().lower() in {reference.strip().lower() for reference in references})


def correct_choice(output: str, references: tuple[str, ...]) -> float:
    """1.0 if the letter after "The correct answer is", in parentheses or not, is a reference; asterisks are ignored.

    Source: THUDM/LongBench, pred.py of LongBench v2, extract_answer.
    """
    plain = output.replace("*", "")
    found = next((match[1] for pattern in _CHOSEN if (match := pattern.search(plain))), None)
    return float(found in references)


def last_letter(output: str, references: tuple[str, ...]) -> float:
    """1.0 if the letter from A to J that is stated as the answer, or else stands alone last, is a reference."""
    return float(chosen_letter(output, "A-J") in references)


def first_number(output: str, references: tuple[str, ...]) -> float:
    """1.0 if the first number, without its sign, is one of the references in value (InfiniteBench's passkeys)."""
    found = NUMBER.search(output)
    values = [float(reference) for reference in references if NUMBER.fullmatch(reference.strip())]
    return float(found is not None and float(found[0]) in values)


def check_form(metric: str, references: tuple[str, ...], where: str) -> None:
    """Raise ValueError, naming the place, for references that no output can match."""
    pattern, form = FORMS.get(metric, (None, ""))
    if pattern is not None and not any(pattern.fullmatch(reference) for reference in references):
        raise ValueError(f"{where}: metric {metric} needs an answer that is {form}, got {', '.join(references)!r:.60}")


METRICS: dict[str, Metric] = {
    "contains": contains,
    "contains_any": contains_any,
    "exact_match": exact_match,
    "correct_choice": correct_choice,
    "last_letter": last_letter,
    "first_number": first_number,
    "needle_words": needle_words,
    "rouge1_recall": rouge1_recall,
    "rouge_l": best(longbench.METRICS["rouge"]),
    "rouge_l_zh": best(longbench.METRICS["rouge_zh"]),
    **{name: best(metric) for name, metric in longbench.METRICS.items() if not name.startswith("rouge")},
}
"""By name. LongBench's and `rouge_l` use the best reference, `contains` the share of references."""
