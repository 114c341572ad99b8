"""What pictures are made of: one measured cell (policy, budget, task, model) each, out of runs or a collected table.

Names are made distinct: two lines that differ in a field say in which, so that no picture joins what is not alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.identity.labels import briefly, compressed, natural, usual
from kvbench.report.figures.style import BASELINE, Look, family, palette
from kvbench.report.records import RunRecord, find_runs
from kvbench.terminal.errors import UsageError

Fields = Mapping[str, Any]
TABLES = (".csv", ".parquet")
_IN_WORDS = ("class", "size", "decode")


@dataclass(frozen=True, eq=False)
class Measured:
    """One cell of a table, as it is drawn. `low` and `high` are the ends of the score's 95% interval.

    policy: the slug with what sets it apart from others of that name; model, task likewise. schedule, decode: words,
    empty where nothing is evicted. compress: the prompt, or the context before its question. held: mean bytes per
    example at the end, without room to spare. run: where the cell is a run on disk.
    """

    policy: str
    schedule: str
    decode: str
    compress: str
    family: str
    model: str
    task: str
    budget: int | float | None
    n: int
    failed: int
    score: float | None
    low: float | None
    high: float | None
    held: float | None
    source: str
    policy_fields: Fields
    task_fields: Fields
    model_fields: Fields
    mixed: str = ""  # versions that differ within the run
    run: RunRecord | None = None

    @property
    def y(self) -> float:
        """The score of a cell that has one."""
        assert self.score is not None
        return self.score

    @property
    def sides(self) -> tuple[float, float]:
        """How far the interval reaches below and above the score."""
        return sides(self.y, self.low, self.high)

    @property
    def is_full(self) -> bool:
        """Whether it is the full cache's."""
        return self.family == BASELINE


def sides(score: float, low: float | None, high: float | None) -> tuple[float, float]:
    """How far an interval reaches below and above its score: 0 without one, and never less, whatever rounding did."""
    return (0.0 if low is None else max(0.0, score - low)), (0.0 if high is None else max(0.0, high - score))


@dataclass(frozen=True)
class Panel:
    """The cells of one model and task, by policy in the order of the legend, each policy's by budget."""

    model: str
    task: str
    lines: Mapping[str, tuple[Measured, ...]]

    @property
    def cells(self) -> list[Measured]:
        return [cell for line in self.lines.values() for cell in line]

    @property
    def full(self) -> Measured | None:
        """The full cache's cell, where it has a score."""
        return next((cell for cell in self.cells if cell.is_full and cell.score is not None), None)


def read(place: Path) -> list[Measured]:
    """All cells of the finished runs below a folder, or of a table that `results collect` wrote. Raises UsageError."""
    if place.suffix in TABLES and place.is_file():
        cells = _of_table(place)
    else:
        cells = [_of_run(run) for run in find_runs(place)]
    return _in_order(_once(_distinct(cells)))


def of_runs(runs: Iterable[RunRecord]) -> list[Measured]:
    """All cells of finished runs."""
    return _in_order(_once(_distinct([_of_run(run) for run in runs])))


def _in_order(cells: Sequence[Measured]) -> list[Measured]:
    """By model and task, those of one name with other fields in the order of their numbers."""
    return sorted(cells, key=lambda cell: (natural(cell.model), natural(cell.task)))


def _of_run(run: RunRecord) -> Measured:
    identity, numbers = run.identity, run.metrics
    named = _named(run.names, identity["policy"], identity["task"], compressed(identity))
    return Measured(
        **named,
        budget=identity["budget"],
        n=numbers["n"],
        failed=numbers["n_failed"],
        score=numbers["score"],
        low=numbers["score_low"],
        high=numbers["score_high"],
        held=numbers["cache_bytes"],
        source=str(run.folder),
        model_fields={name: identity[name] for name in ("model", "dtype", "seed", "generation")},
        mixed=run.mixed,
        run=run,
    )


def _of_table(path: Path) -> list[Measured]:
    import pandas as pd

    try:
        table = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
        rows = table[table["subset"] == "all"].to_dict("records")
        return [_of_row({str(key): value for key, value in row.items()}) for row in rows]
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise UsageError(
            f"{path} is not a table that `python -m kvbench.results collect` wrote ({type(error).__name__}: {error})"
        ) from error


def _of_row(row: Fields) -> Measured:
    import pandas as pd

    names = {name: str(row[name]) for name in ("policy", "model", "task")}
    budget = _known(row["budget"])
    if budget is not None and row["budget_kind"] == "tokens_per_head":
        budget = int(budget)
    fields = json.loads(row["policy_fields"]), json.loads(row["task_fields"])
    return Measured(
        **_named(names, *fields, str(row.get("compress", "prompt"))),
        budget=budget,
        n=int(row["n"]),
        failed=int(row["n_failed"]),
        score=_known(row["score"]),
        low=_known(row["score_low"]),
        high=_known(row["score_high"]),
        held=_known(row["cache_bytes"]),
        source=str(row["run_id"]),
        model_fields={name: row[name] for name in ("weights", "dtype", "seed")},
        mixed="" if pd.isna(row.get("mixed")) else str(row.get("mixed")),
    )


def _known(value: Any) -> float | None:  # noqa: ANN401 - pandas has NaN, NA and None for what is missing
    import pandas as pd

    return None if pd.isna(value) else float(value)


def _named(names: Mapping[str, str], policy: Fields, task: Fields, compress: str) -> dict[str, Any]:
    slug = names["policy"].partition(" (")[0]
    evicts = bool(policy.get("scorer") or policy.get("filter"))
    schedule = policy.get("schedule") or {}
    timed = {"policy": {**policy, "schedule": schedule}, "compress": compress}
    return {
        "policy": slug,
        "schedule": briefly(timed) if evicts else "",
        "decode": str(schedule.get("decode", "")) if evicts else "",
        "compress": compress,
        "family": family(policy),
        "model": names["model"],
        "task": names["task"],
        "policy_fields": policy,
        "task_fields": task,
    }


def _distinct(cells: Sequence[Measured]) -> list[Measured]:
    """The cells with names that say where those of the same name differ; a schedule only where it is mixed."""
    policies = told_apart([(cell.policy, flat(_beside_schedule(cell))) for cell in cells])
    tasks = told_apart([(cell.task, flat(cell.task_fields)) for cell in cells])
    models = told_apart([(cell.model, flat(cell.model_fields)) for cell in cells])
    whens = _whens(cells)
    return [
        replace(cell, policy=f"{policy}{when}", task=task, model=model)
        for cell, policy, task, model, when in zip(cells, policies, tasks, models, whens, strict=True)
    ]


def _whens(cells: Sequence[Measured]) -> list[str]:
    """What stands after a policy's name of its schedule: whatever is not as most of those that evict have it."""
    most_have = usual_of(cells)
    words = []
    for cell in cells:
        said = [own for own, most in zip((cell.schedule, cell.decode), most_have, strict=True) if own not in (most, "")]
        words.append(f" ({', '.join(said)})" if said else "")
    return words


def usual_of(cells: Sequence[Measured]) -> tuple[str, str]:
    """The schedule and the decode rule that most policies have, each counted once."""
    return usual(
        [(when, decode) for _, when, decode in {(c.policy, c.schedule, c.decode) for c in cells if c.schedule}]
    )


def _beside_schedule(cell: Measured) -> Fields:
    """What the words for the schedule do not tell; what is compressed tells no two full caches apart."""
    schedule = {k: v for k, v in (cell.policy_fields.get("schedule") or {}).items() if k not in _IN_WORDS}
    said = bool(cell.schedule) or cell.is_full
    return {**cell.policy_fields, "schedule": schedule, **({} if said else {"compress": cell.compress})}


def told_apart(named: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Each name, and where others have it with other fields (as `flat` gives them), the fields that differ."""
    different: dict[str, set[str]] = {}
    for name in {name for name, _ in named}:
        alike = [fields for other, fields in named if other == name]
        keys = {key for fields in alike for key in fields}
        different[name] = {key for key in keys if len({fields.get(key) for fields in alike}) > 1}
    return [
        " ".join([name, *(f"{_short(key)}={fields.get(key, '-')}" for key in sorted(different[name]))])
        for name, fields in named
    ]


def _short(key: str) -> str:
    return key.rpartition(".")[2] if not key.endswith(".class") else key.removesuffix(".class")


def flat(fields: Any, prefix: str = "") -> dict[str, str]:  # noqa: ANN401 - whatever JSON holds
    """Nested fields as one level, by their paths; values as words, the ends of long ones."""
    if not isinstance(fields, Mapping):
        return {prefix: str(fields)[-24:]}
    found: dict[str, str] = {}
    for key, value in fields.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _once(cells: Sequence[Measured]) -> list[Measured]:
    """The cells, refused where two are the same but for the code that computed them.

    The full cache is the same whatever would have been compressed: of two the first.
    """
    seen: dict[tuple[Any, ...], Measured] = {}
    for cell in cells:
        key = (cell.policy, cell.schedule, cell.decode, cell.model, cell.task, cell.budget)
        if key in seen and cell.is_full and cell.compress != seen[key].compress:
            continue
        if key in seen:
            raise UsageError(
                f"{seen[key].source} and {cell.source} are the same policy, budget, task and model, computed by "
                "different code: a picture shows one of them, move the other away"
            )
        seen[key] = cell
    return list(seen.values())


def choose(cells: Sequence[Measured], **wanted: Sequence[str]) -> list[Measured]:
    """The cells whose policy, task, model and budget are among those wanted (none wanted: all).

    The full cache is always there, as cells without a budget are for any budget. A policy is meant by its slug or by
    its whole name. Raises UsageError for a value that no cell has.
    """
    chosen = list(cells)
    for field, values in wanted.items():
        known = {name for cell in cells for name in _names(cell, field)}
        for value in values:
            if value not in known:
                raise UsageError(f"--{field} {value} is not among the runs (there are: {', '.join(sorted(known))})")
        if values:
            chosen = [cell for cell in chosen if _always(cell, field) or _names(cell, field) & set(values)]
    return _distinct_again(chosen)


def _names(cell: Measured, field: str) -> set[str]:
    if field == "budget":
        return set() if cell.budget is None else {f"{cell.budget:g}"}
    name = str(getattr(cell, field))
    return {name, name.partition(" ")[0]}


def _always(cell: Measured, field: str) -> bool:
    return (field == "policy" and cell.is_full) or (field == "budget" and cell.budget is None)


def _distinct_again(cells: Sequence[Measured]) -> list[Measured]:
    """Names as the chosen cells alone need them."""
    bare = [
        replace(
            cell,
            policy=cell.policy.partition(" ")[0],
            task=cell.task.partition(" ")[0],
            model=cell.model.partition(" ")[0],
        )
        for cell in cells
    ]
    return _distinct(bare)


def panels_of(cells: Iterable[Measured]) -> list[Panel]:
    """The cells by model and task, in the order of their first appearance; lines by family, then by name."""
    groups: dict[tuple[str, str], list[Measured]] = {}
    for cell in cells:
        groups.setdefault((cell.model, cell.task), []).append(cell)
    return [Panel(model, task, _lines(members)) for (model, task), members in groups.items()]


def _lines(cells: Sequence[Measured]) -> dict[str, tuple[Measured, ...]]:
    order = sorted(cells, key=lambda cell: (not cell.is_full, *rank(cell), cell.budget or 0))
    names = dict.fromkeys(cell.policy for cell in order)
    return {name: tuple(cell for cell in order if cell.policy == name) for name in names}


def rank(cell: Measured) -> tuple[str, bool, int, str]:
    """Sorts policies by family, the plain method first, as `style.palette` does."""
    return cell.family, not cell.policy.startswith(cell.family), len(cell.policy), cell.policy


def looks(cells: Iterable[Measured]) -> dict[str, Look]:
    """The look of every policy among the cells."""
    return palette({cell.policy: cell.family for cell in cells})
