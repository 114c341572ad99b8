"""Does the divergence from full predict the score? Rank correlations over the policies of a result pack.

python scripts/kl_and_score.py results/MODEL [--runs RUNS ...]

--runs: first take up the runs with task.divergence=true below these folders: the mean KL of every example, in
kl_samples.csv, where they replace those of the same task, budget, policy and example. From it and from the scores in
samples.csv.gz (`scripts/result_tables.py` does the same) it writes

kl.csv: for each task, budget and policy the mean KL with its interval, and the score of the pack's table, if any.
kl_rank.csv: Spearman's rank correlation of KL and score over the policies of a task, at each budget and at all. Its
95% interval resamples the examples of KL and those of scores, which may be others; the policies are fixed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.stats import spearmanr

from kvbench.report.figures.style import by_factors, looks_of
from kvbench.results.loading import load_results
from kvbench.results.statistics import estimate, mean_interval, tails, weighted_interval

KEY = ["task", "budget", "policy"]
KL_SAMPLES = "kl_samples.csv"
RESAMPLES = 2000
LEAST = 5
"""The fewest policies of a correlation, and the fewest examples of an interval."""
DISTINCT = 3
"""The fewest different scores: with two, every resample gives the same ranks."""


def kl_samples(runs: Sequence[Path]) -> pd.DataFrame:
    """A row for each example of the runs with task.divergence=true below the folders."""
    rows = [
        {
            "task": row.task,
            "budget": row.budget,
            "policy": row.policy,
            "example": sample.index,
            "kl": sample.divergence.mean_kl,
            "tokens": len(sample.divergence.kl),
            "run_id": row.run_id,
        }
        for folder in runs
        for row in load_results(folder)
        if row.measure == "KL"
        for sample in row.samples
        if sample.divergence is not None and sample.divergence.kl
    ]
    return pd.DataFrame(rows)


def taken_up(known: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """The known examples and the new ones, which replace those of the same task, budget, policy and example."""
    both = pd.concat([known, new]) if len(known) else new
    return both.drop_duplicates([*KEY, "example"], keep="last").sort_values([*KEY, "example"], ignore_index=True)


def joined(kl: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """One row for each task, budget and policy but full: KL [n] of its examples, and scores [m], where it has any."""
    tables = (
        samples.dropna(subset="score").groupby([*KEY, "table"], dropna=False)["score"].apply(np.array).reset_index()
    )
    tables = tables.sort_values("score", key=lambda column: column.map(len)).drop_duplicates(KEY, keep="last")
    divergences = kl.groupby(KEY, dropna=False)["kl"].apply(np.array).reset_index()
    found = divergences.merge(tables, on=KEY, how="left")
    return found[(found["policy"] != "full") & found["kl"].map(lambda x: bool(np.isfinite(x).all()))]


def means(rows: pd.DataFrame) -> pd.DataFrame:
    """Means and intervals of KL and score."""
    found = []
    for row in rows.to_dict("records"):
        kl, score = row["kl"], row["score"]
        ends = weighted_interval(kl, [1.0] * len(kl)) if len(kl) >= LEAST else None
        about = {name: row[name] for name in KEY}
        about |= {"n_kl": len(kl), "kl": kl.mean(), "kl_low": ends and ends.low, "kl_high": ends and ends.high}
        if isinstance(score, np.ndarray):
            of_score = mean_interval(score)
            about |= {"table": row["table"], "n_score": len(score), "score": score.mean()}
            about |= {"score_low": of_score.low, "score_high": of_score.high}
        found.append(about)
    return pd.DataFrame(found).round(6).astype({"n_score": "Int64"})


def correlations(rows: pd.DataFrame) -> pd.DataFrame:
    """The rank correlation of each task, at each budget and at all budgets together."""
    found = []
    for task, of_task in rows.groupby("task", sort=False):
        groups = [(f"{budget:g}", some) for budget, some in of_task.groupby("budget")]
        for budget, some in [*groups, ("all", of_task)] if len(groups) > 1 else groups or [("all", of_task)]:
            rho, low, high = correlation(list(some["kl"]), list(some["score"]))
            if rho is not None:
                found.append(
                    {"task": task, "budget": budget, "policies": len(some), "rho": rho, "low": low, "high": high}
                )
    return pd.DataFrame(found).round(3)


def correlation(
    kl: Sequence[np.ndarray], scores: Sequence[np.ndarray], seed: int = 0
) -> tuple[float | None, float | None, float | None]:
    """Spearman's correlation of the means, and its 95% interval over examples; None if it is not defined.

    Of both measures, the same examples are drawn for all policies.
    """
    first, second = (np.array([x.mean() for x in values]) for values in (kl, scores))
    if len(kl) < LEAST or len(set(first)) < DISTINCT or len(set(second)) < DISTINCT:
        return None, None, None
    rng, drawn = np.random.default_rng(seed), []
    examples = [min(map(len, values)) for values in (kl, scores)]
    tables = [np.stack([x[:n] for x in values]) for values, n in zip((kl, scores), examples, strict=True)]
    for _ in range(RESAMPLES):
        a, b = (table[:, rng.integers(n, size=n)].mean(1) for table, n in zip(tables, examples, strict=True))
        if len(set(a)) > 1 and len(set(b)) > 1:
            drawn.append(spearmanr(a, b).statistic)
    low, high = np.quantile(drawn, tails(min(examples)))
    return float(spearmanr(first, second).statistic), float(low), float(high)


def write(pack: Path, samples: pd.DataFrame) -> None:
    """Write kl.csv and kl_rank.csv, from kl_samples.csv and the scores of a pack's samples."""
    rows = joined(pd.read_csv(pack / KL_SAMPLES), samples)
    means(rows).to_csv(pack / "kl.csv", index=False)
    correlations(rows.dropna(subset="score")).to_csv(pack / "kl_rank.csv", index=False)


def figure(rows: pd.DataFrame, ranks: pd.DataFrame, title: str) -> Figure:
    """One panel for each task: the score against KL. rows: of kl.csv; ranks: of kl_rank.csv."""
    rows = rows.dropna(subset="score")
    tasks, largest = list(dict.fromkeys(rows["task"])), rows["budget"].max()
    looks = looks_of(sorted(rows["policy"].unique()))
    found = Figure(figsize=(3.6 * len(tasks) + 2.2, 4.4), layout="constrained")
    FigureCanvasAgg(found)
    panels = found.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        own = rows[rows["task"] == task]
        for row in own.to_dict("records"):
            plot = looks[row["policy"]].plot
            fill = "white" if row["budget"] < largest else plot["color"]
            faint = {"colors": plot["color"], "linewidth": 0.7, "alpha": 0.3, "zorder": 1}
            axes.vlines(row["kl"], row["score_low"], row["score_high"], **faint)
            if pd.notna(row["kl_low"]):
                axes.hlines(row["score"], max(row["kl_low"], own["kl"].min() / 2), row["kl_high"], **faint)
            axes.plot(row["kl"], row["score"], **{**plot, "linestyle": "none", "markerfacecolor": fill})
        words = [
            f"ρ, budget {r.budget}: {estimate(r.rho, r.low, r.high, '+.2f')}"
            for r in ranks[ranks["task"] == task].itertuples()
        ]
        axes.set_title("\n".join([task.removeprefix("ruler_"), *words]), loc="left", fontsize="small")
        by_factors(axes, (own["kl"].min(), own["kl"].max()))
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel(f"KL from full, nats per token (hollow: below budget {largest:g})")
    panels[0].set_ylabel("score")
    filled = {name: {**look.plot, "linestyle": "none", "markerfacecolor": look.colour} for name, look in looks.items()}
    handles = [Line2D([], [], **look, label=name) for name, look in filled.items()]
    found.legend(handles=handles, loc="outside right upper", fontsize="x-small")
    found.suptitle(f"{title}: score against KL from full, with 95% intervals", x=0.01, ha="left", fontsize="medium")
    return found


def main() -> None:
    """Take up runs, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="results/MODEL")
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="folders of runs with task.divergence=true")
    given = parser.parse_args()
    if given.runs:
        file, new = given.pack / KL_SAMPLES, kl_samples(given.runs)
        known = pd.read_csv(file) if file.exists() else new.head(0)
        taken_up(known, new).round({"kl": 6}).to_csv(file, index=False)
    write(given.pack, pd.read_csv(given.pack / "samples.csv.gz"))


if __name__ == "__main__":
    main()
