"""The aggregates of IFEval and IFBench, and of leakage, in percent.

Instruction-level accuracies count every instruction once, whatever the number in its prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.tasks.task import Scored

NEEDS_SCORES = False


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """The four accuracies and those of each group of instructions; leakage; the kept share of each span."""
    found: list[Mapping[str, Any]] = [getattr(answer, "measures", None) or {} for answer in answers]
    values: dict[str, float | None] = {}
    for kind in ("strict", "loose"):
        checked = [
            (answer.metadata["instructions"], one[kind])
            for answer, one in zip(answers, found, strict=True)
            if kind in one
        ]
        if not checked:
            continue
        groups: defaultdict[str, list[bool]] = defaultdict(list)
        for names, passed in checked:
            for name, one in zip(names, passed, strict=True):
                groups[name.partition(":")[0]].append(one)
        values[f"prompt_{kind}"] = 100 * fmean(all(passed) for _, passed in checked)
        values[f"instruction_{kind}"] = 100 * fmean(one for passed in groups.values() for one in passed)
        values |= {f"{group}_{kind}": 100 * fmean(groups[group]) for group in sorted(groups)}
    for name in ("leaked", "defense_leaked", "refused", "rougeL_recall", "rouge1_recall"):
        known = [one[name] for one in found if name in one]
        values |= {name: 100 * fmean(known)} if known else {}
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for answer in answers:
        for name, share in (getattr(answer, "kept_spans", None) or {}).items():
            shares[name].append(share)
    return {**values, **{f"kept_{name}": 100 * fmean(known) for name, known in shares.items()}}
