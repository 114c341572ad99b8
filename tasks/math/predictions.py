r"""Recorded predictions on AIME 2025 and MATH-500: whether the text in a \boxed{...} is the answer.

kvpress's rule compares characters and breaks on nested braces; `sound` compares the values with `math-verify`.
Source: NVIDIA/kvpress at 8bb29b9, evaluation/benchmarks/aime25 and math500, calculate_metrics.py.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from statistics import fmean

from kvbench.tasks.predictions import JUDGES as JUDGES
from kvbench.tasks.predictions import Line, nested, one_of, text, texts, wanted_texts
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
        prediction, (answer, *_) = text(line, "prediction"), wanted_texts(line, "references")
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
    r"""1 if the last box (`\boxed` or `\fbox`), read to its closing brace, has the answer; 0 for a box cut off.

    Values are compared by `math-verify`: `\dfrac{1}{2}`, `0.5` and `\frac12` are equal, and so are `2\ \text{cm}`
    and `2`, `1\,000` and `1000`, `\$36` and `36`. An answer of words is compared as text, ignoring case: it is in a
    text command, such as `\text{Evelyn}`, or has three letters or more in a row and nothing but letters.
    """
    boxes = list(re.finditer(r"(?:boxed|fbox)\s*\{", output))
    inside = up_to_brace(output[boxes[-1].end() :]) if boxes else None
    if inside is None or not inside.strip():
        return 0.0
    found, wanted = _written(inside), _written(answer)
    if "".join(found.split()) == "".join(wanted.split()):
        return 1.0
    if _is_text(answer):
        return float(_words(inside) == _words(answer))
    return float(equal_values(found, wanted))


def equal_values(found: str, wanted: str) -> bool:
    """Whether two LaTeX expressions have the same value."""
    from math_verify import LatexExtractionConfig, parse, verify  # here: takes a second to import

    # The time limits of math-verify are signals, which work only in the main thread.
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    parsed = [
        parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=seconds) for text in (wanted, found)
    ]
    return bool(verify(*parsed, timeout_seconds=seconds))


_SPACE = r"(?:\\[,;:! ]|\\(?:thin|med|thick)space(?![a-z])|\{\\,\}|[~\s])"
_GROUPS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_SPACE}+\d{{3}})+(?!\d)")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|textup|mbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_WORD = r"[^\W\d_]+(?:['’-][^\W\d_]+)*"
_ALL_WORDS = re.compile(rf"[\s(]*{_WORD}(?:[\s,()]+{_WORD})*[\s).,]*")


def _written(text: str) -> str:
    r"""LaTeX without what math-verify cannot read: spaces between groups of digits, `~`, `°`, a percent or full stop.

    `\mathrm{i}` and `\mathrm{e}`, which it takes for units, become plain letters.
    """
    text = _GROUPS.sub(lambda number: re.sub(_SPACE, "", number[0]), text)
    text = re.sub(r"\\mathrm\s*\{\s*([ie])\s*\}", r"\1", text)
    text = text.replace("~", r"\ ").replace("°", r"^\circ").replace("\\$", "").replace("$", "")
    return re.sub(r"(?:\\?%|\.|\s)+$", "", text.strip())


def _is_text(answer: str) -> bool:
    """Whether an answer consists of words and not of variables."""
    plain = _TEXT.sub(r"\1", answer)
    marked = plain != answer
    letters = r"[^\W\d_]{2}" if marked else r"[^\W\d_]{3}"
    return bool(_ALL_WORDS.fullmatch(plain) and re.search(letters, plain)) and (marked or "-" not in plain)


def _words(text: str) -> str:
    """An answer of words without text commands, parentheses, case and repeated white space."""
    plain = unicodedata.normalize("NFKC", re.sub(_SPACE, " ", _TEXT.sub(r"\1", text))).casefold()
    return " ".join(plain.replace("$", "").split()).strip(" .,:;()")
