"""The numbers a benchmark's own scripts print, which are often not the mean over all examples.

Whose they are says metadata["benchmark"] of the examples (see `tasks.benchmarks`). Its function `summary(answers)`
gives aggregates by name, in the benchmark's own unit. It is called where every answer has an output and, unless the
module says NEEDS_SCORES = False, a score.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from types import ModuleType

from kvbench.tasks.benchmarks import benchmark_module
from kvbench.tasks.task import Scored

log = logging.getLogger(__name__)


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Official aggregates of scored answers by name, in the unit of the benchmark (percent); {} where the mean is all.

    Nothing is summed up while an answer has no output or no score: a mean over the rest would flatter whatever failed.
    """
    names = {answer.metadata.get("benchmark") for answer in answers}
    name = names.pop() if len(names) == 1 else None
    module = _module(name) if isinstance(name, str) else None
    if module is None or any(answer.output is None for answer in answers):
        return {}
    if getattr(module, "NEEDS_SCORES", True) and any(answer.score is None for answer in answers):
        return {}
    found: dict[str, float | None] = module.summary(answers)
    return found


@cache
def _module(benchmark: str) -> ModuleType | None:
    """The module with a benchmark's summary; None where it has none and, with a warning, where it is not installed."""
    try:
        module = benchmark_module(benchmark, "summary")
    except ModuleNotFoundError as error:
        log.warning("the aggregates of benchmark %s are left out: %s", benchmark, error)
        return None
    return module if hasattr(module, "summary") else None
