"""The official scores of recorded predictions on InfiniteBench."""

from __future__ import annotations

from kvbench.tasks.infinitebench.metrics import AUTHORS, KVPRESS, SOUND
from kvbench.tasks.predictions import JUDGES as JUDGES
from kvbench.tasks.predictions import Line, corrected, official, one_of, references, text

FIELDS = "task, prediction and references, or references_original if the authors' format differs from kvpress's"


def score_predictions(line: Line, protocol: str = "authors") -> Line:
    """`score` from 0 to 1, and `score_sound` for tasks with a broken official rule (`metrics.SOUND`).

    references: a list, for multiple choice [option, letter] or the letter alone; numbers for code_run, math_find and
    math_calc. Raises ValueError, naming the field, if the line has another format.
    """
    task = one_of(line, "task", tuple(AUTHORS))
    prediction = text(line, "prediction")
    theirs = "references_original" if protocol == "authors" and "references_original" in line else "references"
    wanted = references(line, theirs)
    found = official(lambda: {"authors": AUTHORS, "kvpress": KVPRESS}[protocol][task](prediction, wanted))
    return {**found, **corrected(SOUND[task], prediction, wanted, theirs, task)} if task in SOUND else found
