"""Scores predictions made elsewhere: `python -m kvbench.score longbench predictions.jsonl -o scored.jsonl`.

A line is a JSON object: one prediction, or the predictions of a whole task. Every line comes out as it went in, with
`score` as the official code prints it; an old `score` is ignored, all other fields are copied.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from kvbench.errors import UsageError
from kvbench.files import write_atomically
from kvbench.tasks.longbench.metrics import score as longbench_score
from kvbench.tasks.longbench.subsets import EXTENDED, SUBSETS
from kvbench.tasks.longbench.summary import by_bin, percent
from kvbench.tasks.needlebench import scores as needlebench
from kvbench.tasks.needlebench.grids import KINDS
from kvbench.tasks.needlebench.summary import cells_of_results, overall
from kvbench.tasks.ruler.protocol import PROTOCOLS
from kvbench.tasks.ruler.summary import percent as ruler_percent

Line = dict[str, Any]

ABOUT = {
    "longbench": "dataset, prediction and answers; or dataset, predictions, answers of each and, for LongBench-E (mode "
    "e, or a dataset ending in _e), lengths; with all_classes where the class is scored",
    "ruler": "task, predictions and the references of each",
    "needlebench": "task, predictions and references (the official gold strings); or results, OpenCompass's table of "
    "cells, whose averages come out beside the overall score",
}


def score_longbench(line: Line, true_rouge: bool = False) -> Line:
    """`score` in percent, rounded to two decimals; LongBench-E (mode "e", or a name ending in _e) has one per bin.

    One prediction: dataset, prediction, answers. A subset: dataset, predictions, answers of each, and for mode "e"
    lengths. all_classes is needed where the class is scored. true_rouge: ROUGE also where the official code overflows
    Python's stack and scores 0. Raises ValueError, naming the field, where the line is of another form.
    """
    dataset, mode = _dataset(line)
    subset = SUBSETS[dataset]
    classes = None if line.get("all_classes") is None else _texts(line, "all_classes")
    rate = partial(longbench_score, subset, all_classes=classes, official=not true_rouge)
    if "predictions" not in line:
        return {"score": percent([rate(_text(line, "prediction"), _texts(line, "answers"))])}
    predictions = _predictions(line)
    scores = [rate(*pair) for pair in zip(predictions, _nested(line, "answers", len(predictions)), strict=True)]
    if mode == "main":
        return {"score": percent(scores)}
    return {"score": by_bin(scores, _numbers(line, "lengths", len(predictions)))}


def score_ruler(line: Line) -> Line:
    """`score` in percent, rounded to two decimals, from task, predictions and the references of each.

    Raises ValueError, naming the field, where the line is of another form.
    """
    protocol = PROTOCOLS[_one_of(line, "task", tuple(PROTOCOLS))]
    predictions = _predictions(line)
    pairs = zip(predictions, _nested(line, "references", len(predictions)), strict=True)
    return {"score": ruler_percent([protocol.score(prediction, tuple(wanted)) for prediction, wanted in pairs])}


def score_needlebench(line: Line, v2: bool = False) -> Line:
    """`score` from 0 to 100, unrounded: of task, predictions and references, or the overall score of `results`.

    results: OpenCompass's table of cells; the averages of the three tasks come out beside the score.
    Raises ValueError, naming the field, where the line is of another form.
    """
    if "results" in line:
        return _needlebench_overall(line["results"], v2)
    task = _one_of(line, "task", KINDS)
    predictions = _predictions(line)
    golds = _texts(line, "references")
    if len(golds) != len(predictions):
        raise ValueError(f"references has {len(golds)} entries for {len(predictions)} predictions")
    if task == "multi_retrieval":
        return {"score": needlebench.mean_over_depths(needlebench.multi_retrieval(predictions, golds))}
    rate: Callable[[str, str], float] = needlebench.multi_reasoning
    if task == "single_retrieval":
        rate = partial(needlebench.single_retrieval, v2=v2)
    elif v2:
        rate = needlebench.boxed_answer
    return {"score": fmean(rate(prediction, gold) for prediction, gold in zip(predictions, golds, strict=True))}


def score_file(path: Path, output: Path, rate: Callable[[Line], Line]) -> int:
    """Score every line of a file, write them all or none, and return their number.

    Raises UsageError with one sentence, naming file and line, for the first thing that is wrong; `output` is then as it
    was before.
    """
    scored = []
    for number, text in enumerate(_lines(path), start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not JSON, the file is damaged or cut off ({error})") from error
        if not isinstance(line, dict):
            raise UsageError(f"{path}, line {number}: must be a JSON object, with the fields of one prediction or task")
        try:
            scored.append(json.dumps({**line, **rate(line)}, ensure_ascii=False))
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
    try:
        write_atomically(output, "\n".join(scored) + "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"-o {output} cannot be written ({error})") from error
    return len(scored)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 where something is wrong."""
    asked = _parser().parse_args(arguments)
    rate: Callable[[Line], Line] = score_ruler
    if asked.benchmark == "longbench":
        rate = partial(score_longbench, true_rouge=asked.true_rouge)
    elif asked.benchmark == "needlebench":
        rate = partial(score_needlebench, v2=asked.v2)
    try:
        count = score_file(asked.predictions, asked.output, rate)
    except UsageError as error:
        sys.stderr.write(f"kvbench: {error}\n")
        return 2
    sys.stdout.write(f"{count} lines -> {asked.output}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvbench.score", description=__doc__)
    files = argparse.ArgumentParser(add_help=False)
    files.add_argument("predictions", type=Path, help="file with one JSON object per line")
    files.add_argument("-o", "--output", type=Path, required=True, help="file to write, all of it or none")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    for name, fields in ABOUT.items():
        about = f"Fields of a line: {fields}."
        command = benchmarks.add_parser(name, parents=[files], help=fields, description=about)
        if name == "longbench":
            text = "ROUGE also where the official code overflows Python's stack and scores 0"
            command.add_argument("--true-rouge", action="store_true", help=text)
        if name == "needlebench":
            text = "score as the version of June 2025: no points for wording, boxed answers, equal weights"
            command.add_argument("--v2", action="store_true", help=text)
    return parser


def _needlebench_overall(results: object, v2: bool) -> Line:
    if not isinstance(results, dict) or not all(isinstance(values, dict) for values in results.values()):
        raise ValueError("results must be OpenCompass's table, an object of objects")
    found = overall(cells_of_results(results))
    return {**found, "score": found["overall_equal_weights" if v2 else "overall"]}


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        before = error.object[: error.start].count(b"\n")
        raise UsageError(f"{path}, line {before + 1}: not UTF-8 text") from error
    if not content.strip():
        raise UsageError(f"{path} is empty, it must have one JSON object per line")
    return content.removesuffix("\n").split("\n")


def _dataset(line: Line) -> tuple[str, str]:
    """(subset, mode "main" or "e")."""
    name = _text(line, "dataset")
    subset = name.removesuffix("_e")
    mode = line.get("mode", "e" if subset != name else "main")
    if subset not in SUBSETS:
        raise ValueError(f"dataset={name!r} is not known, choose one of {', '.join(SUBSETS)}")
    if mode not in ("main", "e"):
        raise ValueError(f"mode={mode!r} is not known, choose 'main' or 'e'")
    if mode == "e" and subset not in EXTENDED:
        raise ValueError(f"dataset={name!r} is not part of LongBench-E, choose one of {', '.join(EXTENDED)}")
    return subset, mode


def _one_of(line: Line, name: str, allowed: Sequence[str]) -> str:
    value = _text(line, name)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known, choose one of {', '.join(allowed)}")
    return value


def _text(line: Line, name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, it is {_shown(line, name)}")
    return value


def _texts(line: Line, name: str) -> list[str]:
    value = line.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name} must be a list of at least one text, it is {_shown(line, name)}")
    return value


def _predictions(line: Line) -> list[str]:
    return _texts(line, "predictions")


def _nested(line: Line, name: str, count: int) -> list[list[str]]:
    """A list of texts for each of `count` predictions."""
    value = line.get(name)
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"{name} must have a list for each of the {count} predictions, it is {_shown(line, name)}")
    return [_texts({name: texts}, name) for texts in value]


def _numbers(line: Line, name: str, count: int) -> list[int]:
    value = line.get(name)
    if not isinstance(value, list) or len(value) != count or not all(isinstance(number, int) for number in value):
        raise ValueError(f"{name} must have a number for each of the {count} predictions, it is {_shown(line, name)}")
    return value


def _shown(line: Line, name: str) -> str:
    if name not in line:
        return "missing"
    text = json.dumps(line[name], ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


if __name__ == "__main__":
    sys.exit(main())
