"""Where the evidence for an answer is in a prompt: the needles, documents or lines that the answer needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from string import Formatter

Parts = tuple[tuple[int, int], ...]
"""Parts of a text: first and last characters [a, b) each."""

EVIDENCE, DISTRACTORS = "evidence", "distractors"
HIDDEN = (EVIDENCE, DISTRACTORS)
"""Names in `Example.spans` of parts that policies do not know: their kept share is only recorded."""


def places(texts: Iterable[str], whole: str) -> Parts:
    """Every place of each text."""
    return tuple((found.start(), found.end()) for text in texts for found in re.finditer(re.escape(text), whole))


def needle_spans(context: str, asked: Iterable[str], needles: Iterable[str], start: int = 0) -> dict[str, Parts]:
    """The needles that are asked for, and all others. start: index of the context in the prompt."""
    wanted = tuple(asked)
    others = [needle for needle in needles if needle not in wanted]
    return shifted({EVIDENCE: places(wanted, context), DISTRACTORS: places(others, context)}, start)


def pair_spans(value: str, context: str) -> dict[str, Parts]:
    """The pair `"key": "value"` of a JSON context with this value, if there is exactly one."""
    found = [match.span() for match in re.finditer(rf'"[^"]*": "{re.escape(value)}"', context)]
    return {EVIDENCE: tuple(found)} if len(found) == 1 else {}


def shifted(spans: Mapping[str, Parts], by: int) -> dict[str, Parts]:
    """The spans in a text with `by` more characters before it, without empty ones."""
    return {name: tuple((a + by, b + by) for a, b in parts) for name, parts in spans.items() if parts}


def start_of(template: str, slot: str, **filled: object) -> int:
    """The index of the first character of a slot in the filled template."""
    start = 0
    for text, name, _, _ in Formatter().parse(template):
        start += len(text)
        if name == slot:
            return start
        start += len(str(filled[name])) if name else 0
    raise KeyError(slot)
