"""Fields of results that are computed from samples: their meaning and how they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from kvbench.results.samples import Sample

Statistic = Callable[[Sequence[Sample]], float | None]


def number(meaning: str, of: Statistic | None = None, over: str = "good") -> Any:  # noqa: ANN401
    """A field of `Numbers`. of: computes it from samples; None: the mean of the samples' field of the same name.

    over: the samples it is computed from: "all"; "good", those without an error; or "alone", the good ones if no
    example was batched with others, otherwise none.
    """
    return field(metadata={"meaning": meaning, "of": of, "over": over})
