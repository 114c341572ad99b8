"""The official scores of recorded predictions on InfiniteBench."""

from __future__ import annotations

from kvbench.tasks.infinitebench.metrics import AUTHORS, KVPRESS, SOUND, listed
from kvbench.tasks.predictions import JUDGES as JUDGES
from kvbench.tasks.predictions import RAISED, Line, official, one_of, references, text

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
    if task not in SOUND:
        return found
    try:
        return {**found, "score_sound": SOUND[task](prediction, wanted if task == "kv_retrieval" else listed(wanted))}
    except RAISED as error:
        raise ValueError(f"{theirs}={wanted!r:.60} does not have the format of {task} ({error})") from error
