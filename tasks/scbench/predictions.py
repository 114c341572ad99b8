"""The official scores of recorded predictions on SCBench: of one answer, or of a file of answers in turns.

Corrected scores are added for official rules that treat a text as a list of its characters.
Source: microsoft/MInference at fb56c91, scbench/compute_scores.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.tasks.infinitebench import metrics as infinitebench
from kvbench.tasks.infinitebench.metrics import any_inside, listed
from kvbench.tasks.longbench.metrics import character_f1
from kvbench.tasks.predictions import JUDGES as JUDGES
from kvbench.tasks.predictions import Line, Rule, corrected, official, one_of, references, text, wanted_texts
from kvbench.tasks.scbench.repoqa import LANGUAGES, repoqa
from kvbench.tasks.scores import NUMBER, best, contains, rouge_lsum

MIXED = {
    "scbench_summary_with_needles": ("scbench_summary", "scbench_passkey"),
    "scbench_repoqa_and_kv": ("scbench_repoqa", "scbench_kv"),
}
"""Tasks with two kinds of turns, which have separate scores."""
REPOQA = "scbench_repoqa"


def inside(output: str, references: Any) -> float:  # noqa: ANN401 - JSON
    """1 if the answer is part of the output, including case."""
    return float(references in output)


def names(output: str, references: Any) -> float:  # noqa: ANN401
    """Share of the names in the output, ignoring case, to two decimals."""
    return round(contains(output, references), 2)


def number_cut(output: str, references: Any) -> float:  # noqa: ANN401
    """1 if the first number, without its sign and truncated if the answer is an integer, is the answer."""
    wanted, found = infinitebench.first(references), NUMBER.search(output)
    truncated = str(int(float(found[0]))) if isinstance(wanted, int) and found is not None else output
    return infinitebench.first_number(truncated, wanted)


RULES: dict[str, Rule] = {
    "scbench_kv": inside,
    "scbench_prefix_suffix": inside,
    "scbench_vt": names,
    "scbench_qa_eng": any_inside,
    "scbench_qa_chn": best(character_f1),
    "scbench_choice_eng": infinitebench.choice_authors,
    "scbench_many_shot": any_inside,
    "scbench_mf": number_cut,
    "scbench_summary": lambda output, references: best(rouge_lsum)(output, listed(references)),
    "scbench_passkey": infinitebench.first_digits,
}
"""By task; RepoQA is scored by `repoqa`."""
SOUND: dict[str, Rule] = {
    "scbench_qa_eng": lambda output, references: any_inside(output, listed(references)),
    "scbench_qa_chn": lambda output, references: best(character_f1)(output, listed(references)),
    "scbench_choice_eng": infinitebench.SOUND["longbook_choice_eng"],
    "scbench_many_shot": lambda output, references: any_inside(output, listed(references)),
    "scbench_mf": infinitebench.same_number,
}
"""By task, for official rules that reject correct answers or accept wrong ones."""

FIELDS = (
    "task (subtask for mixed ones), prediction and references; for RepoQA also lang, func_name and needles; or task, "
    "mode and rows of id, turn_idx, prediction, ground_truth (task; lang, repo, func_name)"
)
MODES = ("multi_turn", "scdq")
TASKS = (*(name for name in RULES if name != "scbench_passkey"), REPOQA, *MIXED)
Row = Mapping[str, Any]


def score_predictions(line: Line, protocol: str = "authors") -> Line:
    """`score` from 0 to 1, and `score_sound` for broken rules; for rows, percent (3 decimals) of each of `columns`.

    protocol: has no effect, because kvpress has no SCBench. mode: "multi_turn" has a column per turn, "scdq" one.
    Raises ValueError, naming the field, if the line has another format.
    """
    task = one_of(line, "task", TASKS)
    if "rows" in line:
        return _file(line, task, one_of(line, "mode", MODES))
    name = one_of(line, "subtask", MIXED[task]) if task in MIXED else task
    if name == REPOQA:
        lang = one_of(line, "lang", LANGUAGES)
        needles = [
            {part: wanted_texts({part: [text(one, part)]}, part)[0] for part in ("needle", "name")}
            for one in references(line, "needles")
        ]
        return {"score": repoqa(text(line, "prediction"), lang, text(line, "func_name"), needles)}
    pair = text(line, "prediction"), references(line)
    found = official(lambda: RULES[name](*pair))
    return {**found, **corrected(SOUND[name], *pair, "references", name)} if name in SOUND else found


def _file(line: Line, task: str, mode: str) -> Line:
    rows = _rows(line, task)
    turns = {"all turns": rows}
    if mode == "multi_turn":
        turns = {f"turn {turn}": [row for row in rows if row["turn_idx"] == turn] for turn in _turns(rows)}
    groups = {
        f"{label}, {kind}" if task in MIXED else label: [row for row in members if row["task"] == kind]
        for label, members in turns.items()
        for kind in MIXED.get(task, (task,))
    }
    sound = official(lambda: [_percent(members, rows, {**RULES, **SOUND}) for members in groups.values()])["score"]
    found = official(lambda: [_percent(members, rows, RULES) for members in groups.values()])
    if task == "scbench_repoqa_and_kv" and mode == "scdq" and found["score"]:
        found["score"][1] = 0.0  # the official code looks for the value in the keys of a row
    return {**found, "columns": list(groups)} | ({} if found["score"] == sound else {"score_sound": sound})


def _rows(line: Line, task: str) -> list[Row]:
    rows: list[Row] = []
    for row in references(line, "rows"):
        if not isinstance(row, dict):
            raise ValueError(f"rows must be a list of objects, one of them is {row!r:.60}")
        kind = one_of(row, "task", MIXED[task]) if task in MIXED else task
        one: dict[str, Any] = {"task": kind, "prediction": text(row, "prediction"), "turn_idx": row.get("turn_idx")}
        one["ground_truth"] = references(row, "ground_truth")
        if kind == REPOQA:
            one |= {"lang": one_of(row, "lang", LANGUAGES)} | {name: text(row, name) for name in ("repo", "func_name")}
        rows.append(one)
    return rows


def _turns(rows: Sequence[Row]) -> list[Any]:
    return list(dict.fromkeys(row["turn_idx"] for row in rows))


def _percent(members: Sequence[Row], rows: Sequence[Row], rules: Mapping[str, Rule]) -> float:
    """Mean of the members, 0 without any; the functions for RepoQA come from all rows of the repository."""
    scores = [_row_score(row, rows, rules) for row in members]
    return round(100 * fmean(scores), 3) if scores else 0.0


def _row_score(row: Row, rows: Sequence[Row], rules: Mapping[str, Rule]) -> float:
    if row["task"] != REPOQA:
        return rules[row["task"]](row["prediction"], row["ground_truth"])
    same_repo = [one for one in rows if one["task"] == REPOQA and one["repo"] == row["repo"]]
    needles = [{"needle": one["ground_truth"], "name": one["func_name"]} for one in same_repo]
    return repoqa(row["prediction"], row["lang"], row["func_name"], needles)
