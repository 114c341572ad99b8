"""How the papers lay their tables out: results/paper/<paper>/layout.yaml, and the words of results/paper/names.yaml.

A layout says what differs from the default (rows are methods, columns tasks, blocks models and budgets); its fields are
those of `Arrangement`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import yaml

from kvbench.papers import published
from kvbench.papers.published import Number

_TUPLES = ("parts", "rows", "columns", "blocks", "marks")


@dataclass(frozen=True)
class Arrangement:
    """How one table is laid out. rows, columns, blocks: fields of a number (outermost first), or names made by `split`.

    section: of the paper. parts: the CSVs it is made of, where the paper prints them as one. split: a field and a
    regular expression whose named groups become fields. marks: what the paper marks in each column of a block (best,
    second). complete: every block has all rows and every row all columns, so that what is not there was lost: a hole,
    and `holes` says how. repeat_full: the full cache stands beside every budget. labels: words for values of a field.
    """

    title: str
    section: str = ""
    parts: tuple[str, ...] = ()
    rows: tuple[str, ...] = ("method",)
    columns: tuple[str, ...] | None = None
    blocks: tuple[str, ...] | None = None
    split: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    complete: bool = True
    holes: str = ""
    repeat_full: bool = False
    corner: str = ""
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Names:
    """What all papers share. labels: of the values of a field; categories: of LongBench's tasks; models: conf/model."""

    labels: Mapping[str, Mapping[str, str]]
    categories: Mapping[str, str]
    models: Mapping[str, str]


@cache
def names() -> Names:
    """The names of results/paper/names.yaml."""
    raw = read_yaml("names.yaml")
    categories = {str(task): category for category, tasks in raw["categories"].items() for task in tasks}
    return Names(_words(raw["labels"]), categories, raw["models"])


@cache
def arrangement(name: str) -> Arrangement:
    """How `caote/table2` is laid out. Raises UsageError for an unknown table, ValueError for a wrong layout.yaml."""
    paper, _, table = name.partition("/")
    given = dict(_layout(name)) or dict(_layout(whole(name)))
    if not given:
        published.read_table(name)  # refuses an unknown table, and says what is close
        raise ValueError(f"{paper}/layout.yaml says nothing of {table}")
    known = [f.name for f in fields(Arrangement)]
    if wrong := sorted(set(given) - set(known)):
        raise ValueError(f"{paper}/layout.yaml: {table} has {', '.join(wrong)} (allowed: {', '.join(known)})")
    given |= {key: tuple(given[key]) for key in _TUPLES if key in given}
    return Arrangement(**{**given, "labels": _words(given.get("labels", {}))})


def tables(paper: str | None = None) -> tuple[str, ...]:
    """Every table that can be laid out: the CSVs, and those of one printed table as one."""
    return tuple(dict.fromkeys(whole(name) for name in published.tables(paper)))


def whole(name: str) -> str:
    """The printed table that a CSV is a part of, or the CSV itself."""
    paper, _, table = name.partition("/")
    if paper in published.papers():
        for printed, given in _layouts(paper).items():
            if table in given.get("parts", ()):
                return f"{paper}/{printed}"
    return name


def numbers(name: str) -> tuple[Number, ...]:
    """The numbers of a printed table, or of one CSV. Raises UsageError for an unknown one."""
    paper = name.partition("/")[0]
    if parts := _layout(name).get("parts"):
        return tuple(number for part in parts for number in published.read_table(f"{paper}/{part}"))
    return published.read_table(name)


def read_yaml(path: str) -> Any:  # noqa: ANN401 - whatever YAML holds
    """A file of results/paper."""
    return yaml.safe_load((published.folder() / path).read_text(encoding="utf-8"))


def _layout(name: str) -> Mapping[str, Any]:
    paper, _, table = name.partition("/")
    return _layouts(paper).get(table, {}) if paper in published.papers() else {}


@cache
def _layouts(paper: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read_yaml(f"{paper}/layout.yaml")
    return found


def _words(raw: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[str, str]]:
    return {key: {str(value): str(words) for value, words in of.items()} for key, of in raw.items()}
