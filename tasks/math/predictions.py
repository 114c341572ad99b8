r"""Recorded predictions on AIME 2025 and MATH-500: whether the text in a \boxed{...} is the answer.

kvpress's rule compares characters and breaks on nested braces; `sound` compares the values with `math-verify`.
Source: NVIDIA/kvpress at 8bb29b9, evaluation/benchmarks/aime25 and math500, calculate_metrics.py.
"""

from __future__ import annotations

import re
import threading
from statistics import fmean

from kvbench.tasks.predictions import JUDGES as JUDGES
from kvbench.tasks.predictions import Line, nested, one_of, text, texts
from kvbench.tasks.scores import up_to_brace

TASKS = ("aime25", "math500")
BOX = "boxed{"
FIELDS = "task, prediction and references (one answer); or a list of predictions and the references of each"


def score_predictions(line: Line, protocol: str = "authors") -> Line:
    """`score` (0 or 1), the extracted answer, and `score_sound`, which compares values; means for lists.

    protocol: has no effect, because the benchmarks' authors published no scorer of such outputs.
    Raises ValueError, naming the field, if the line has another format.
    """
    task = one_of(line, "task", TASKS)
    if not isinstance(line.get("prediction"), list):
        prediction, (answer, *_) = text(line, "prediction"), texts(line, "references")
        found: Line = {"score": score(task, prediction, answer), "score_sound": sound(prediction, answer)}
        return {**found, "answered": answered(prediction), "extracted": boxed(task, prediction)}
    predictions = texts(line, "prediction")
    answers = [wanted[0] for wanted in nested(line, "references", len(predictions))]
    pairs = list(zip(predictions, answers, strict=True))
    scores = [score(task, *pair) for pair in pairs]
    counts = {"correct": sum(scores), "answered": sum(map(answered, predictions)), "total": len(scores)}
    return {
        "score": fmean(scores),
        "score_sound": fmean(sound(*pair) for pair in pairs),
        "scores": {**counts, "accuracy": fmean(scores)},
    }


def boxed(task: str, output: str) -> str | None:
    """The text of the last box (MATH-500: the first box) up to the next closing brace.

    Without a box: the output up to the next closing brace for AIME, None for MATH-500.
    """
    pieces = output.split(BOX)
    if task == "math500":
        return pieces[1].split("}")[0] if len(pieces) > 1 else None
    return pieces[-1].split("}")[0]


def answered(output: str) -> bool:
    """Whether the output has a box."""
    return BOX in output


def score(task: str, output: str, answer: str) -> float:
    """1 if the boxed text is the answer, character by character."""
    return float(boxed(task, output) == answer)


def sound(output: str, answer: str) -> float:
    r"""1 if the last box, read to its closing brace, has the value of the answer, as compared by `math-verify`.

    `\dfrac{1}{2}`, `0.5` and `\frac12` are equal, and so are `\text{Evelyn}` and `Evelyn`, `\$36` and `36`.
    """
    boxes = list(re.finditer(r"boxed\s*\{", output))
    if not boxes:
        return 0.0
    rest = output[boxes[-1].end() :]
    inside = up_to_brace(rest)
    found, wanted = _plain(rest if inside is None else inside), _plain(answer)
    return float(found == wanted or equal_values(found, wanted))


def equal_values(found: str, wanted: str) -> bool:
    """Whether two LaTeX expressions have the same value."""
    from math_verify import LatexExtractionConfig, parse, verify  # here: takes a second to import

    # The time limits of math-verify are signals, which work only in the main thread.
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    parsed = [
        parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=seconds) for text in (wanted, found)
    ]
    return bool(verify(*parsed, timeout_seconds=seconds))


def _plain(text: str) -> str:
    """An answer without white space, dollars and text commands."""
    text = re.sub(r"\\(?:text|textbf|mbox|mathrm)\s*\{([^{}]*)\}", r"\1", text)
    return "".join(text.split()).replace("\\$", "").replace("$", "")
