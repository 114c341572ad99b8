"""The numbers a benchmark's own scripts print, which are often not the mean over all examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvbench.tasks.lm_eval import summary as lm_eval
from kvbench.tasks.longbench import summary as longbench
from kvbench.tasks.needlebench import summary as needlebench
from kvbench.tasks.ruler import summary as ruler
from kvbench.tasks.task import Scored

_BENCHMARKS: Mapping[str, Callable[[Sequence[Scored]], dict[str, float | None]]] = {
    "lm_eval": lm_eval.summary,
    "longbench": longbench.summary,
    "needlebench": needlebench.summary,
    "ruler": ruler.summary,
}


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Official aggregates of scored answers by name, in the unit of the benchmark (percent); {} where the mean is all.

    metadata["benchmark"] of the examples says whose. Nothing is summed up while an answer has no output or no score: a
    mean over the rest would flatter whatever failed. Only lm-eval has metrics without a score for a single answer.
    """
    benchmarks = {str(answer.metadata.get("benchmark")) for answer in answers}
    if len(benchmarks) != 1 or not benchmarks <= set(_BENCHMARKS):
        return {}
    (name,) = benchmarks
    if any(answer.output is None or (answer.score is None and name != "lm_eval") for answer in answers):
        return {}
    return _BENCHMARKS[name](answers)
