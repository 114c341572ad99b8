"""The claims of a paper: `results/paper/<paper>/claims.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from kvbench.config.tree import load
from kvbench.papers.claims.claim import Cell, Claim, Source, Trial
from kvbench.papers.claims.printed import Compared, Computed, Falling, Unprinted
from kvbench.papers.published import FOLDER


@cache
def claims_of(paper: str) -> tuple[Claim, ...]:
    """The claims of a paper, in the order of its file."""
    found = load(FOLDER / paper / "claims.yaml")["claims"]
    return tuple(_claim(paper, name, given) for name, given in found.items())


def _claim(paper: str, name: str, given: Mapping[str, Any]) -> Claim:
    """A claim; its fields are those of `Claim`, its source is one of compare, falling, compute and unprinted."""
    fields = dict(given)
    source = _source(paper, fields)
    trial = _trial(fields.pop("trial")) if "trial" in fields else None
    return Claim(paper=paper, name=name, source=source, trial=trial, **fields)


def _source(paper: str, fields: dict[str, Any]) -> Source:
    """Where the cells come from, taken out of `fields`."""
    if "compare" in fields:
        return _compared(paper, fields.pop("compare"))
    if "falling" in fields:
        return Falling(_compared(paper, fields.pop("falling")))
    if "compute" in fields:
        own = fields.pop("compute")
        return Computed(partial(_computed, own["function"]), own["unit"])
    return Unprinted(fields.pop("unprinted"))


def _computed(name: str) -> list[Cell]:
    from kvbench.papers.claims import computed  # imports torch, which a slip of the command need not wait for

    found: list[Cell] = getattr(computed, name)()
    return found


def _compared(paper: str, given: Mapping[str, Any]) -> Compared:
    """versus: a list of `{method: rival}`, or `{method: [rivals]}` of which the best counts."""
    versus = [(method, _list(rivals)) for one in given["versus"] for method, rivals in one.items()]
    return Compared(**{**given, "tables": [f"{paper}/{table}" for table in given["tables"]], "versus": versus})


def _trial(given: Mapping[str, Any]) -> Trial:
    """pairs: `{policy: rival}` or `{policy: [rivals]}`, of which every one is a pair."""
    pairs = tuple((policy, rival) for policy, rivals in given["pairs"].items() for rival in _list(rivals))
    return Trial(**{**given, "pairs": pairs, "budgets": tuple(given.get("budgets", ()))})


def _list(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given
