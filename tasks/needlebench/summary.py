"""NeedleBench's averages: of cells (length, depth), over sub-tasks, languages and numbers of needles.

Source: open-compass/opencompass at a5acc4b, opencompass/summarizers/needlebench.py; weights of v1: arXiv 2407.11963.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from statistics import fmean

from kvbench.tasks.needlebench import scores
from kvbench.tasks.needlebench.grids import KINDS, LANGUAGES, NEEDLES
from kvbench.tasks.task import Scored

Run = tuple[int, int]  # length, depth
Column = tuple[str, str, int]  # kind, language, needles (0 for multi retrieval: one at every depth)
Cells = Mapping[Column, Mapping[Run, float]]  # 0 to 100

WEIGHTS = {"single_retrieval": 0.4, "multi_retrieval": 0.3, "multi_reasoning": 0.3}
ALL_COLUMNS: tuple[Column, ...] = tuple(
    (kind, language, needles)
    for kind in KINDS
    for language in LANGUAGES
    for needles in {"single_retrieval": (1,), "multi_retrieval": (0,), "multi_reasoning": NEEDLES}[kind]
)
_POINT = re.compile(r"Length(\d+)Depth(\d+)_(?:origin|(\d)needle)_(en|zh)_\w+")
_ROW = re.compile(r"Length(\d+)_parallel_(en|zh)_\w+")


def overall(cells: Cells, columns: Iterable[Column] = ALL_COLUMNS) -> dict[str, float | None]:
    """Score of every kind, and "overall" with v1's weights 0.4, 0.3, 0.3 and with equal ones.

    columns: the expected ones. As in the official code, a cell that is missing in one column is ignored in all, so a
    missing sub-task removes its cells. None if no cell is left.
    """
    expected = list(columns)
    found = {kind: grid_mean(_weighted(cells, [one for one in expected if one[0] == kind], WEIGHTS)) for kind in KINDS}
    all_kinds = {kind for kind, *_ in expected} == set(KINDS)
    for name, weights in (("overall", WEIGHTS), ("overall_equal_weights", dict.fromkeys(KINDS, 1 / 3))):
        found[name] = grid_mean(_weighted(cells, expected, weights)) if all_kinds else None
    return found


def grid_mean(cells: Mapping[Run, float]) -> float | None:
    """Mean over the depths of every length, then over lengths; None without cells."""
    lengths: dict[int, list[float]] = {}
    for (length, _), score in cells.items():
        lengths.setdefault(length, []).append(score)
    return fmean(fmean(scores) for scores in lengths.values()) if lengths else None


def cells_of_results(results: Mapping[str, Mapping[str, float | None]]) -> Cells:
    """Cells of OpenCompass's results table: `Length1000Depth5_origin_en_4k`, `Length1000_parallel_en_4k`, ...

    Raises ValueError, naming the entry, for another format. Missing values and NaN are skipped.
    """
    cells: dict[Column, dict[Run, float]] = {}
    for name, values in results.items():
        if point := _POINT.fullmatch(name):
            length, depth, needles, language = point.groups()
            column: Column = ("multi_reasoning" if needles else "single_retrieval", language, int(needles or 1))
            points = {int(depth): values.get("score")}
        elif row := _ROW.fullmatch(name):
            length, language = row.groups()
            column = ("multi_retrieval", language, 0)
            depths = {key: value for key, value in values.items() if key.startswith("Depth")}
            points = {int(key.removeprefix("Depth")): value for key, value in depths.items()}
        else:
            raise ValueError(f"result {name!r} does not have a format such as Length1000Depth5_origin_en_4k")
        for at, score in points.items():
            if isinstance(score, int | float) and not isnan(score):
                cells.setdefault(column, {})[(int(length), at)] = float(score)
    return cells


def cells_of_answers(answers: Sequence[Scored]) -> Cells:
    """Cells of the scored answers of a run. Multi retrieval is scored again from the outputs, for each depth."""
    rows: dict[tuple[str, int], list[Scored]] = {}
    points: dict[Column, dict[Run, list[float]]] = {}
    for answer in answers:
        about = answer.metadata
        if about["task"] == "multi_retrieval":
            rows.setdefault((about["language"], about["length"]), []).append(answer)
        elif answer.score is not None:
            column = (about["task"], about["language"], about["needles"])
            points.setdefault(column, {}).setdefault((about["length"], about["depth"]), []).append(100 * answer.score)
    cells = {column: {cell: fmean(each) for cell, each in group.items()} for column, group in points.items()}
    for (language, length), group in rows.items():
        found = scores.multi_retrieval([a.output or "" for a in group], [a.references[0] for a in group])
        own = cells.setdefault(("multi_retrieval", language, 0), {})
        own |= {(length, depth): score for depth, score in found.items()}
    return cells


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Percent of every kind in the answers, and the overall score, with v2's equal weights for v2.

    Only the cells of single retrieval and multi reasoning count, also for multi retrieval.
    """
    cells = cells_of_answers(answers)
    found = overall(cells, tuple(cells))
    equal = found.pop("overall_equal_weights")
    if all(answer.metadata.get("v2") for answer in answers):
        found["overall"] = equal
    return {name: value for name, value in found.items() if value is not None}


def heat_map(answers: Sequence[Scored]) -> dict[Run, float]:
    """One score for every complete cell, with v1's weights of the kinds."""
    cells = cells_of_answers(answers)
    return _weighted(cells, list(cells), WEIGHTS)


def _weighted(cells: Cells, columns: Sequence[Column], weights: Mapping[str, float]) -> dict[Run, float]:
    """The mean over the columns of each kind and the weighted mean over kinds, for cells that all columns have."""
    groups = {name: group for name in KINDS if (group := [column for column in columns if column[0] == name])}
    share = sum(weights[name] for name in groups)
    complete = sorted(set.intersection(*(set(cells.get(column, ())) for column in columns))) if columns else []
    return {
        cell: sum(weights[name] / share * fmean(cells[one][cell] for one in group) for name, group in groups.items())
        for cell in complete
    }
