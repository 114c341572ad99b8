"""Token coverage: the share of the prompt that at least one layer and head holds (K-VEC, tables 6 and 7)."""

from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import least_budget
from kvbench.report.figures.style import INK, legend_below, looks_of
from kvbench.tools.diagnostics.probe import Probe

TITLE = "tokens of the prompt kept at least once over layers and heads, %"
RATES = (0.25, 0.5, 0.75, 0.9)
GIVEN: dict[str, Any] = {"markersize": 10, "markerfacecolor": "none", "markeredgewidth": 1.5}


def check(policy: Policy, name: str) -> None:
    """Raise ValueError for a policy that evicts nothing."""
    if not policy.evicts:
        raise ValueError(f"coverage needs a policy that evicts: policy={name} keeps every token")


def measure(probe: Probe) -> list[dict[str, object]]:
    """Coverage at the probe's budget, and at K-VEC's eviction rates: per head max(least + 1, round((1 - rate) * T)).

    Percent of distinct prompt tokens held anywhere at the end of the prompt, window included.
    """
    rows = [_row(probe, None, probe.policy.budget)]
    scorer = probe.policy.scorer
    if scorer is not None:
        least = least_budget(scorer, probe.policy.allocator)
        for rate in RATES:
            budget = max(least + 1, round((1 - rate) * probe.length))
            rows.append(_row(probe.with_budget(budget), rate, budget))
    return rows


def _row(probe: Probe, rate: float | None, budget: float | None) -> dict[str, object]:
    cache = probe.prefilled()
    kept = torch.cat([layer.positions.flatten() for layer in cache.attention_layers])
    distinct = int((kept.unique() >= 0).sum())
    return {"rate": rate, "budget": budget, "tokens": probe.length, "coverage": 100 * distinct / probe.length}


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """One line for each policy over the eviction rates, and a ring at the given budget."""
    axes = figure.subplots()
    looks = looks_of([str(policy) for policy in table["policy"].unique()])
    for policy, rows in table.groupby("policy", sort=False):
        rates, look = rows.dropna(subset="rate").groupby("rate")["coverage"].mean(), looks[str(policy)]
        axes.plot(rates.index, rates.to_numpy(), label=str(policy), **look.plot)
        given = rows[rows["rate"].isna()]
        kept = given["budget"].where(given["budget"] < 1, given["budget"] / given["tokens"])
        ring = {**look.plot, "linestyle": "none", **GIVEN}
        axes.plot(1 - kept.clip(upper=1).mean(), given["coverage"].mean(), **ring)
    axes.plot([], [], label="the given budget", color=INK, **GIVEN, marker="o", linestyle="none")
    axes.set(xlabel="eviction rate (share of the prompt evicted per head)", ylabel="coverage, %", ylim=(0, 102))
    legend_below(figure, axes)
