"""Official scores of LongProc's answers: routes, beliefs and tables.

Source: princeton-pli/LongProc at 78e873a, longproc/. Metrics are those of the official code, 0 to 1 except where said.
"""

from __future__ import annotations

import csv
import re
import string
from collections.abc import Sequence

from kvbench.tasks.longproc import countdown

Metrics = dict[str, float]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_TOM = re.compile(
    r"\b(a|an|the|on|in|at|the|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief)\b"
)
_LOG = "# Search Procedure"


def tagged(text: str, tag: str) -> str | None:
    """The text between the first <tag> and the first </tag>, wherever they are; None without one of them."""
    start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    return None if start == -1 or end == -1 else text[start + len(tag) + 2 : end].strip()


def accuracy(right: bool, partial: float, extracted: bool) -> Metrics:
    """The three metrics of most tasks."""
    return {"accuracy": float(right), "partial_accuracy": partial, "extraction_rate": float(extracted)}


def path_traversal(output: str, reference: str) -> Metrics:
    """A route: equal, or the place of its first wrong line, counted from 1, divided by the number of lines."""
    found, expected = tagged(output, "Route"), reference.strip()
    if found is None:
        return accuracy(False, 0.0, False)
    if found == expected:
        return accuracy(True, 1.0, True)
    lines, wanted = found.split("\n"), expected.split("\n")
    compared = list(zip(lines, wanted, strict=False))
    wrong = next((place for place, (line, right) in enumerate(compared) if line != right), len(compared) - 1)
    return accuracy(False, (wrong + 1) / len(wanted), True)


def tom_tracking(output: str, reference: str) -> Metrics:
    """Beliefs: lines that begin with "-", equal after normalisation; else the share before the first difference."""
    found, wanted = _beliefs(output), _beliefs(reference)
    if found == wanted:
        return accuracy(True, 1.0, True)
    short = min(len(found), len(wanted))
    same = next((place for place in range(short) if found[place] != wanted[place]), short)
    return accuracy(False, same / len(wanted), True)


def _beliefs(text: str) -> list[str]:
    kept = "\n".join(line for line in text.splitlines() if line.strip().startswith("-")).strip()
    lines = (line.split("-", 1)[1] for line in kept.split("\n") if line.startswith("-"))  # an indented one is lost
    return [plain for line in lines if (plain := _plain_belief(line))]


def _plain_belief(line: str) -> str:
    plain = "".join(c for c in line.lower() if c not in string.punctuation and c != "’")
    return " ".join(_TOM.sub(" ", plain).split())


def html_to_tsv(output: str, reference: str) -> Metrics:
    """F1 over the rows of a table, in any order; a row counts if all of its cells are equal after normalisation."""
    fenced = re.search(r"```tsv([\s\S]*)```", output)
    text = fenced[1] if fenced else output.split("```tsv")[1] if "```tsv" in output else output
    found, wanted = _table(text), _table(reference)
    if not found or not wanted or len(found[0]) != len(wanted[0]):
        return {"f1": 0.0, "precision": 0.0, "recall": 0.0, "extraction_rate": 0.0}
    precision = sum(row in wanted for row in found) / len(found)
    recall = sum(row in found for row in wanted) / len(wanted)
    f1 = 2 * recall * precision / (recall + precision) if recall + precision else 0.0
    return {"f1": f1, "precision": precision, "recall": recall, "extraction_rate": 1.0}


def _table(text: str) -> list[list[str]] | None:
    """The normalised rows below the header; None if the official code fails on them."""
    try:
        header, *rows = csv.reader(text.strip().split("\n"), delimiter="\t")
    except (csv.Error, ValueError):
        return None
    if not rows or len(set(header)) < len(header):
        return None
    if len(rows[-1]) != len(header):  # often an end mark
        rows = rows[:-1]
    missing = ["N/A"] * len(header)
    return [[_plain_cell(cell) for cell in (row if len(row) == len(header) else missing)] for row in rows]


def _plain_cell(cell: str) -> str:
    plain = "".join(c for c in cell.lower() if c not in string.punctuation)
    return "".join(_ARTICLES.sub(" ", plain).split())


def countdown_score(output: str, numbers: Sequence[int], target: int, reference: str) -> Metrics:
    """A solution that reaches the target, or the share of the search log that follows the reference.

    Raises RaisesError where the official code does.
    """
    solution = tagged(output, "Solution")
    if solution is not None and countdown.solves(numbers, target, solution):
        return accuracy(True, 1.0, True)
    if _LOG not in output:
        return accuracy(False, 0.0, solution is not None)
    wanted = reference.split(_LOG)[-1].split("Now we have found the target")[0]
    return accuracy(False, countdown.followed(output.split(_LOG)[-1], wanted), solution is not None)
