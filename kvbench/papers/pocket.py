"""`scale=pocket`: the runs of a table on the shipped pocket model, offline, with prompts and budgets that are shorter.

What stands in for what says `results/paper/pocket.yaml`. The chain is the same, values are not comparable: no published
number is shown beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from kvbench.config.presets import policy_config
from kvbench.papers import arrangement
from kvbench.papers.protocol import Plan

SHORTER = "shorter"
SHORTEST = 512  # tokens of a prompt
MODEL = "pocket model, not comparable in value"
BENCHMARKS = {"ruler": "RULER", "longbench": "LongBench"}


@dataclass(frozen=True)
class StandIn:
    """Offline tasks in place of the tasks that `of` fits. shorter: tokens of the paper for one of ours."""

    of: str
    shorter: int
    tasks: Mapping[str, Mapping[str, Any]]


@cache
def stand_ins() -> tuple[StandIn, ...]:
    """What results/paper/pocket.yaml says."""
    return tuple(StandIn(one["of"], one["shorter"], one["as"]) for one in _read()["tasks"])


@cache
def _read() -> dict[str, Any]:
    found: dict[str, Any] = arrangement.read_yaml("pocket.yaml")
    return found


def stand_in(plan: Plan) -> StandIn | None:
    """What stands in for the task of a run; None where nothing does."""
    return next((one for one in stand_ins() if fnmatchcase(plan.task, one.of)), None)


def scaled(plan: Plan) -> list[Plan]:
    """The runs on the pocket model that stand in for a planned one; none where nothing does."""
    found = stand_in(plan)
    return [] if found is None else list(_scaled(plan, found))


def _scaled(plan: Plan, by: StandIn) -> Iterator[Plan]:
    unset = (*_read()["unset"], "model.", "task.")
    own = {key: value for key, value in plan.settings.items() if not key.startswith(unset)}
    if isinstance(own.get("block"), int):
        own["block"] = _fewer(own["block"], by.shorter)
    own |= _windows(plan.policy, by.shorter) if plan.budget is not None else {}
    budget = _fewer(plan.budget, by.shorter) if isinstance(plan.budget, int) else plan.budget
    for task, fields in by.tasks.items():
        given = {key: _length(key, plan, by.shorter) if value == SHORTER else value for key, value in fields.items()}
        if None not in given.values():
            yield replace(
                plan,
                model=_read()["model"],
                budget=budget,
                task=task,
                settings={**own, **given},
                measure="score",
                only={},
                times=100.0,
                notes=(),
                sources={},
            )


def _fewer(tokens: int, by: int) -> int:
    return max(1, round(tokens / by))


def _windows(policy: str, by: int) -> dict[str, int]:
    """The windows of a policy, shorter as its budget is."""
    found = {}
    for field in _read()["windows"]:
        part, name = field.split(".")
        tokens = (policy_config(policy).get(part) or {}).get(name)
        if isinstance(tokens, int):
            found[f"policy.{field}"] = _fewer(tokens, by)
    return found


def _length(key: str, plan: Plan, by: int) -> int | list[int] | None:
    """The paper's (longest) length, shorter and a multiple of 256; None where that is too short for the task."""
    given = plan.settings.get(key.replace("task.lengths", "task.length"), plan.settings.get("task.lengths"))
    longest = max(given) if isinstance(given, list) else given
    tokens = 256 * round(longest / by / 256) if longest else 0
    if tokens < SHORTEST:
        return None
    return [tokens] if key == "task.lengths" else tokens


def title(plan: Plan) -> str:
    """What a stand-in is called in a table, below its heading: `RULER 2048|multikey 2`."""
    lengths = plan.settings.get("task.lengths") or [plan.settings.get("task.length", "")]
    benchmark, _, task = plan.task.rpartition("/")
    own = task.removeprefix("niah").strip("_").replace("_", " ")
    return f"{BENCHMARKS.get(benchmark, 'NIAH')} {lengths[0]}".strip() + f"|{own or 'single'}"


def about(plans: Sequence[Plan]) -> list[str]:
    """What a reader must know of a pocket table: what stands for what."""
    names: dict[str, list[str]] = {}
    for plan in plans:
        if (by := stand_in(plan)) is not None and plan.task not in names.setdefault(by.of, []):
            names[by.of].append(plan.task)
    said = []
    used = [by for by in stand_ins() if by.of in names]
    for by in used:
        own = names[by.of]
        what = own[0] if len(own) == 1 else f"{len(own)} tasks {by.of}"
        said.append(
            f"In place of {what}: {', '.join(by.tasks)}; one token for {by.shorter} of the paper's in prompts, "
            "budgets, blocks and windows."
        )
    told = {task: words for by in used for task, words in _read()["say"].items() if task in by.tasks}
    return [*said, *(f"{task}: {words}." for task, words in told.items())]
