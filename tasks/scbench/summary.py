"""SCBench's aggregates: percent (three decimals) of each turn or of all, two for mixed tasks, and `score_sound`."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.tasks.scbench.predictions import MIXED, score_predictions
from kvbench.tasks.scores import mean_measures
from kvbench.tasks.task import Scored


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """The numbers that the official code prints for a file of these answers; turns count from 1."""
    kinds = {answer.metadata["task"] for answer in answers}
    task = next((name for name, members in MIXED.items() if len(kinds) > 1 and kinds <= {*members}), min(kinds))
    found = score_predictions({"task": task, "mode": answers[0].metadata["mode"], "rows": list(map(_row, answers))})
    official = found["score"] or [None] * len(found["columns"])
    sound = {name: value for name, value in mean_measures(answers).items() if name == "score_sound"}
    return dict(zip(found["columns"], official, strict=True)) | sound


def _row(answer: Scored) -> dict[str, object]:
    about = answer.metadata
    known = {name: about[name] for name in ("task", "lang", "repo", "func_name") if name in about}
    return {**known, "turn_idx": about["turn"], "prediction": answer.output, "ground_truth": about["answers"]}
