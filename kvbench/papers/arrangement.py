"""How the papers lay their tables out: results/paper/<paper>/layout.yaml, and the words of results/paper/names.yaml.

A layout says what differs from the default (rows are methods, columns tasks, blocks models and budgets); its fields are
those of `Arrangement`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kvbench.config.tree import load
from kvbench.papers import published
from kvbench.papers.published import Number


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
    """What all papers share.

    labels: of the values of a field; categories: of LongBench's tasks; models: their names in conf/model; gated: of
    which of those the hub asks to accept a licence.
    """

    labels: Mapping[str, Mapping[str, str]]
    categories: Mapping[str, str]
    models: Mapping[str, str]
    gated: frozenset[str]


@cache
def names() -> Names:
    """The names of results/paper/names.yaml."""
    raw = read_yaml("names.yaml")
    categories = {str(task): category for category, tasks in raw["categories"].items() for task in tasks}
    return Names(_words(raw["labels"]), categories, raw["models"], frozenset(raw["gated"]))


@cache
def arrangement(name: str) -> Arrangement:
    """How `caote/table2` is laid out. Raises UsageError for an unknown table."""
    given = _layouts(name).get(name) or _layouts(name).get(whole(name))
    if given is None:
        published.read_table(name)  # refuses an unknown table, and says what is close
        raise ValueError(f"layout.yaml says nothing of {name}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Arrangement(**{**values, "labels": _words(given.get("labels", {}))})


def tables(paper: str | None = None) -> tuple[str, ...]:
    """Every table that can be laid out: the CSVs, and those of one printed table as one."""
    return tuple(dict.fromkeys(whole(name) for name in published.tables(paper)))


def whole(name: str) -> str:
    """The printed table that a CSV is a part of, or the CSV itself."""
    table = name.partition("/")[2]
    return next((one for one, given in _layouts(name).items() if table in given.get("parts", ())), name)


def numbers(name: str) -> tuple[Number, ...]:
    """The numbers of a printed table, or of one CSV. Raises UsageError for an unknown one."""
    paper = name.partition("/")[0]
    parts = _layouts(name).get(name, {}).get("parts")
    names = [name] if parts is None else [f"{paper}/{part}" for part in parts]
    return tuple(number for one in names for number in published.read_table(one))


@cache
def read_yaml(path: str) -> dict[str, Any]:
    """A file of results/paper, which is not to be changed."""
    return load(published.FOLDER / path)


def _layouts(name: str) -> dict[str, dict[str, Any]]:
    """What the layout.yaml of a table's paper says, by the tables' whole names; {} where there is no such paper."""
    paper = name.partition("/")[0]
    if paper not in published.papers():
        return {}
    return {f"{paper}/{table}": given for table, given in read_yaml(f"{paper}/layout.yaml").items()}


def _words(raw: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[str, str]]:
    return {key: {str(value): str(words) for value, words in of.items()} for key, of in raw.items()}
