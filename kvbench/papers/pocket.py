"""`scale=pocket`: the runs of a table on the shipped pocket model, offline, with prompts and budgets that are shorter.

What stands in for what says `results/paper/pocket.yaml`. The chain is the same, values are not comparable: no published
number is shown beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from kvbench.config.presets import policy_config
from kvbench.papers import arrangement
from kvbench.papers.protocol import Plan

SHORTER = "shorter"
SHORTEST = 512  # tokens of a prompt
MODEL = "pocket model, not comparable in value"
BENCHMARKS = {"ruler": "RULER", "longbench": "LongBench"}


StandIn = Mapping[str, Any]
"""An entry of `tasks` in results/paper/pocket.yaml: the offline tasks `as` in place of those that `of` fits."""


def _said(field: str) -> Any:  # noqa: ANN401 - whatever YAML holds
    return arrangement.read_yaml("pocket.yaml")[field]


def stand_in(plan: Plan) -> StandIn | None:
    """What stands in for the task of a run; None where nothing does."""
    return next((one for one in _said("tasks") if fnmatchcase(plan.task, one["of"])), None)


def scaled(plan: Plan) -> list[Plan]:
    """The runs on the pocket model that stand in for a planned one; none where nothing does."""
    found = stand_in(plan)
    return [] if found is None else list(_scaled(plan, found["shorter"], found["as"]))


def _scaled(plan: Plan, by: int, tasks: Mapping[str, Mapping[str, Any]]) -> Iterator[Plan]:
    """by: tokens of the paper for one of ours; tasks: ours, with their fields."""
    unset = (*_said("unset"), "model.", "task.")
    own = {key: value for key, value in plan.settings.items() if not key.startswith(unset)}
    if isinstance(own.get("block"), int):
        own["block"] = _fewer(own["block"], by)
    own |= _windows(plan.policy, by) if plan.budget is not None else {}
    budget = _fewer(plan.budget, by) if isinstance(plan.budget, int) else plan.budget
    measured = Plan(_said("model"), plan.policy, budget, "", {}, "score", {}, 100.0, (), {})
    for task, fields in tasks.items():
        given = {key: _length(key, plan, by) if value == SHORTER else value for key, value in fields.items()}
        if None not in given.values():
            yield replace(measured, task=task, settings={**own, **given})


def _fewer(tokens: int, by: int) -> int:
    return max(1, round(tokens / by))


def _windows(policy: str, by: int) -> dict[str, int]:
    """The windows of a policy, shorter as its budget is."""
    found = {}
    for field in _said("windows"):
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
    """The name of a stand-in in a table, below its heading: `RULER 2048|multikey 2`."""
    lengths = plan.settings.get("task.lengths") or [plan.settings.get("task.length", "")]
    benchmark, _, task = plan.task.rpartition("/")
    own = task.removeprefix("niah").strip("_").replace("_", " ")
    return f"{BENCHMARKS.get(benchmark, 'NIAH')} {lengths[0]}".strip() + f"|{own or 'single'}"


def about(plans: Sequence[Plan]) -> list[str]:
    """The notes of a pocket table: which task stands for which."""
    names: dict[str, list[str]] = {}
    for plan in plans:
        if (by := stand_in(plan)) is not None and plan.task not in names.setdefault(by["of"], []):
            names[by["of"]].append(plan.task)
    used = [by for by in _said("tasks") if by["of"] in names]
    said = []
    for by in used:
        own = names[by["of"]]
        what = own[0] if len(own) == 1 else f"{len(own)} tasks {by['of']}"
        said.append(
            f"In place of {what}: {', '.join(by['as'])}; one token for {by['shorter']} of the paper's in prompts, "
            "budgets, blocks and windows."
        )
    told = {task: words for by in used for task, words in _said("say").items() if task in by["as"]}
    return [*said, *(f"{task}: {words}." for task, words in told.items())]
