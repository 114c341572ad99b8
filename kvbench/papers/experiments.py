"""The text of `conf/experiment/<paper>/<table>.yaml`; `scripts/write_experiments.py` writes the files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from kvbench.papers import arrangement
from kvbench.papers.lost import printed_cells
from kvbench.papers.protocol import Plan, refused
from kvbench.papers.published import Number
from kvbench.papers.sweeps import SWEPT, PlannedSweep, in_sweeps, planned_runs, word

WIDTH = 118
HYDRA = ("hydra:", "  mode: MULTIRUN", "  sweeper:", "    grids: # of each: every combination of its values")
LONG = 5  # values of a list that is written once and referred to


def runnable_tables() -> tuple[str, ...]:
    """The tables of which something can be run, each of which has an experiment of its name."""
    return tuple(name for name in arrangement.tables() if planned_runs(printed_cells(name)))


def experiment(name: str) -> str:
    """What stands in the file of a table of which something can be run.

    Numbers that the text of the paper has lost are run as well: the paper ran them.
    """
    runs = planned_runs(printed_cells(name))
    sweeps = in_sweeps(runs)
    lines = [
        "# @package _global_",
        *_header(name, runs),
        *HYDRA,
    ]
    anchors: dict[tuple[Any, ...], str] = {}
    shared = _repeated(sweeps)
    for sweep in sweeps:
        fields = [*_axes(sweep, shared, anchors), *_settings(sweep)]
        text = "\n".join(("  - " if place == 0 else "    ") + field for place, field in enumerate(fields))
        lines += textwrap.indent(text, "    ").splitlines()
    return "\n".join([*lines, *_left_out(name)]) + "\n"


def _header(name: str, runs: Sequence[Plan]) -> Iterator[str]:
    paper, _, table = name.partition("/")
    about = arrangement.read_yaml(f"{paper}/protocol.yaml")
    plan = arrangement.arrangement(name)
    where = f"section {plan.section}" if plan.section else ""
    title = f"{about['paper']}, {table}{f' ({where})' if where else ''}: {plan.title}."
    yield from _comment(f"{title} {len(runs)} runs.")
    yield from _comment(f"All of it: python -m kvbench experiment={name}; a part: python -m kvbench.tables run {name}.")
    named = {word for one in runs for word in (one.task, one.policy)}
    for one in about["about"]:
        if any(fnmatchcase(word, one["of"]) for word in named):
            yield from _comment(f"{one['of']}: {one['say']}")
    for note in dict.fromkeys(note for one in runs for note in one.notes):
        yield from _comment(f"Note: {note}.")
    yield f"# Written by scripts/write_experiments.py: change results/paper/{paper}/protocol.yaml, not this file."


def _comment(sentence: str, indent: str = "") -> list[str]:
    return textwrap.wrap(sentence, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ", **_WHOLE)


_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def _repeated(found: Sequence[PlannedSweep]) -> set[tuple[Any, ...]]:
    """Long lists of values that several sweeps have."""
    lists = [values for sweep in found for values in sweep.axes if len(values) >= LONG]
    return {values for values in lists if lists.count(values) > 1}


def _axes(sweep: PlannedSweep, shared: set[tuple[Any, ...]], anchors: dict[tuple[Any, ...], str]) -> Iterator[str]:
    for key, values in zip(SWEPT, sweep.axes, strict=True):
        if values in anchors:
            yield f"{key}: *{anchors[values]}"
        elif values != (None,):
            mark = ""
            if values in shared:
                anchors[values] = f"{key}s{len(anchors) + 1}"
                mark = f"&{anchors[values]} "
            yield _listed(f"{key}: {mark}", [word(value) for value in values])


def _listed(head: str, values: Sequence[str]) -> str:
    """`head[a, b, c]`, folded."""
    return _folded(f"{head}[{', '.join(values)}]")


def _settings(sweep: PlannedSweep) -> Iterator[str]:
    """The fields that all runs share, each with its source: behind it, or above all that are from there."""
    for source, keys in groupby(sweep.settings, key=lambda key: sweep.sources[key]):
        fields = [_folded(f"{key}: {_single(sweep.settings[key]).replace(',', ', ')}") for key in keys]
        behind = f"{fields[0]} # {source}"
        if len(fields) > 1 or len(behind) > WIDTH - 4:
            yield f"# {source}"
            yield from fields
        else:
            yield behind


def _single(value: Any) -> str:  # noqa: ANN401 - whatever YAML holds
    """One value of a grid; a list would be several."""
    return f"[{word(value)}]" if isinstance(value, list | tuple) else word(value)


def _folded(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WIDTH - 4, subsequent_indent="      ", **_WHOLE))


def _left_out(name: str) -> Iterator[str]:
    """What of the table cannot be run, and why."""
    for reason, numbers in refused(printed_cells(name)).items():
        count = f"{len(numbers)} number{'s' if len(numbers) > 1 else ''}"
        yield from _comment(f"Not here, {count}{_of(name, numbers)}: {reason}.")


def _of(name: str, numbers: Sequence[Number]) -> str:
    """Of which models, methods or tasks they are, where those have no others."""
    rest = [number for number in arrangement.numbers(name) if number not in numbers]
    for field in ("model", "method", "task", "metric"):
        own = dict.fromkeys(getattr(number, field) for number in numbers)
        if "" not in own and not {getattr(number, field) for number in rest} & set(own) and len(own) <= LONG:
            return f" of {', '.join(own)}"
    return ""
