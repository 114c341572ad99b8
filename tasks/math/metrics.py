r"""Whether the text in a \boxed{...} is the answer: kvpress's rule, which breaks on nested braces, and a sound one.

Source: NVIDIA/kvpress at 8bb29b9, evaluation/benchmarks/aime25 and math500, calculate_metrics.py.
"""

from __future__ import annotations

TASKS = ("aime25", "math500")
BOX = "boxed{"


def boxed(task: str, output: str) -> str | None:
    """The text of the last box, for MATH-500 of the first, up to the next brace that closes.

    Without a box: for AIME the output up to such a brace, for MATH-500 None.
    """
    pieces = output.split(BOX)
    if task == "math500":
        return pieces[1].split("}")[0] if len(pieces) > 1 else None
    return pieces[-1].split("}")[0]


def answered(output: str) -> bool:
    """Whether there is a box."""
    return BOX in output


def score(task: str, output: str, answer: str) -> float:
    """1 if the boxed text is the answer, character by character."""
    return float(boxed(task, output) == answer)


def sound(output: str, answer: str) -> float:
    """1 if the last box, read to the brace that closes it, has the answer; white space and dollars do not count."""
    return float(answered(output) and _plain(_balanced(output.rpartition(BOX)[2])) == _plain(answer))


def _balanced(text: str) -> str:
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return text


def _plain(text: str) -> str:
    return "".join(text.split()).replace("$", "")
