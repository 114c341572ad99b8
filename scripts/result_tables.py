"""Tables and figures of a result pack, from the runs of `conf/experiment/results/MODEL/*.yaml`.

python scripts/result_tables.py RUNS -o results/MODEL. RUNS has a folder for each table. Writes one tidy CSV for each
table, a policy x task table for RULER, the paired differences to base policies, the decided claims, every example's
scores (samples.csv.gz) and the figures.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import yaml
from matplotlib.ticker import ScalarFormatter

from kvbench.papers.claims import PAPERS, decide, read_claims
from kvbench.results.changes import changes
from kvbench.results.result import Result, load_results
from kvbench.results.statistics import holm, mean_interval, paired_difference
from kvbench.results.summary import Outcome

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "results"
PAIRS = {  # CAOTE's H2O keeps no recent window
    f"{value}_{base}": "h2o_norecent" if base == "h2o" and value != "ada" else base
    for base in ("snapkv", "h2o", "tova", "roco", "pyramidkv", "knorm", "keydiff", "cake", "kvec")
    for value in ("caote", "fastcaote", "ada")
} | dict.fromkeys(["chunkkv_snapkv", "critical_snapkv", "defensivekv", "layer_defensivekv"], "snapkv")
ONCE = {"schedule": "prompt", "block": None, "decode": "grow"}
ON_NEEDLES = {**ONCE, "task": "niah"}
TASKS = "ruler_niah_multikey_2", "ruler_vt", "ruler_niah_multikey_3"
CLAIMS = {  # table of runs: claims that its task can decide, and the fields that replace those of the claims
    "needles": [
        (
            ["caote/always-task", "caote/needle-gain", "cake/needle-best", "cake/pyramid-not-better", "d2o/needle",
             "kvec/needle"],
            {**ON_NEEDLES, "budget": [512, 1024]},
        ),
        (["cake/near-lossless-1024", "kvec/near-full-1024"], {**ON_NEEDLES, "budget": [1024]}),
        (["today/two-and-a-half-bits"], ON_NEEDLES),
    ],
    "ruler": [
        (names, {**ONCE, "task": task, "task.length": 2048, **budget})
        for task in TASKS
        for names, budget in (
            (
                ["caote/always-task", "cake/needle-best", "cake/pyramid-not-better", "kvec/needle"],
                {"budget": [256, 512]},
            ),
            (["today/two-and-a-half-bits"], {}),
        )
    ],
    "ruler_1024": [
        (
            ["cake/near-lossless-1024", "kvec/near-full-1024"],
            {**ONCE, "task": TASKS[2], "task.length": 2048, "budget": [1024]},
        ),
    ],
    "ruler_context": [
        (
            ["today/kvzip-question-unknown"],
            {**ONCE, "task": TASKS[0], "task.length": 2048, "budget": [512, 1024], "compress": "context"},
        ),
    ],
    "needles_context": [
        (["today/kvzip-question-unknown"], {**ON_NEEDLES, "budget": [256, 1024], "compress": "context"}),
    ],
}  # fmt: skip
SHOWN = ["full", "streamingllm", "random", "h2o", "tova", "snapkv", "ada_snapkv", "cake", "expected_attention", "kvec"]
BYTES = ["full", "fp8", "int8", "nvfp4", "kivi", "turboquant", "snapkv", "kvzip", "kvzip_fp8"]
SOLVED = 0.3
"""Tasks of which the full cache solves less show nothing about a policy."""
MAPS = ["full", "streamingllm", "h2o", "snapkv", "cake", "expected_attention"]


def samples(runs: Path) -> pd.DataFrame:
    """A row for each example of each run: table, policy, budget, depth, score or NLL, bytes and kept tokens."""
    rows = []
    for file in sorted(runs.glob("*/*/samples.jsonl")):
        config = yaml.safe_load((file.parent / "config.yaml").read_text())
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            if sample["error"]:
                continue  # such a run has no score
            kept = [heads for layer in sample["kept_tokens"] for heads in layer]
            likelihood = sample.get("likelihood") or {}
            rows.append(
                {
                    "table": file.parent.parent.name,
                    "policy": file.parent.name.split("-")[1],  # with its store: snapkv_fp8
                    "budget": config["identity"]["budget"],
                    "task": sample["metadata"].get("task", ""),
                    "example": sample["index"],
                    "depth": sample["metadata"].get("depth"),
                    "prompt_tokens": sample["prompt_tokens"],
                    "score": sample["score"],
                    "nll": likelihood.get("nll"),
                    "scored_tokens": likelihood.get("tokens"),
                    "kept_per_head": sum(kept) / len(kept),
                    "cache_bytes": sample["cache_bytes"],
                    "full_cache_bytes": sample["full_cache_bytes"],
                    "tokens": sample["generated_tokens"],
                    "cut_off": sample.get("finish_reason") == "length",
                    "kv_footprint": sample.get("kv_footprint"),
                    "run_id": file.parent.name,
                }
            )
    return pd.DataFrame(rows)


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """Mean score (95% interval), bytes and difference to `full` on the same examples, for each run."""
    rows = []
    for (task, policy, budget), some in found.groupby(["task", "policy", "budget"], dropna=False, sort=False):
        full = found[(found.policy == "full") & (found.task == task)].set_index("example")
        shared = [example for example in some.example if example in full.index]
        own = some.set_index("example")
        measure = "score" if some.score.notna().any() else "nll"
        interval = mean_interval(some[measure].tolist()) if measure == "score" else None
        less = paired_difference(full.loc[shared, measure].tolist(), own.loc[shared, measure].tolist())
        rows.append(
            {
                "task": task,
                "policy": policy,
                "budget": budget,
                "n": len(some),
                measure: some[measure].mean(),
                **({"low": interval.low, "high": interval.high} if interval else {}),
                "vs_full": less.mean if policy != "full" else None,
                "vs_full_low": less.low if policy != "full" and len(shared) > 1 else None,
                "vs_full_high": less.high if policy != "full" and len(shared) > 1 else None,
                **(answers(full.loc[shared], own.loc[shared]) if interval else {}),
                "kept_per_head": some.kept_per_head.mean(),
                "cache_mib": some.cache_bytes.mean() / 2**20,
                # of the bytes that full held on the same examples: equal bytes are equal shares
                "share_of_full": own.loc[shared, "cache_bytes"].sum() / full.loc[shared, "cache_bytes"].sum(),
            }
        )
    return pd.DataFrame(rows).sort_values(["task", "budget", "policy"], ignore_index=True)


def answers(full: pd.DataFrame, own: pd.DataFrame) -> dict[str, float]:
    """The answers of a policy beside those of `full` to the same examples, as `kvbench results collect` counts them.

    lost, gained, tokens_vs_full: see `Changes`. tokens: mean length. cut_off: share that reached max_new_tokens.
    kv_footprint: entries held, over all fed tokens, as a share of the full cache's.
    """
    found = changes(outcomes(full), outcomes(own))
    return {
        "lost": found.lost.mean if found and found.lost else math.nan,
        "gained": found.gained.mean if found and found.gained else math.nan,
        "tokens": own.tokens.mean(),
        "tokens_vs_full": found.length.mean if found and found.length else math.nan,
        "cut_off": own.cut_off.mean(),
        "kv_footprint": own.kv_footprint.mean(),
    }


def outcomes(some: pd.DataFrame) -> list[Outcome]:
    """The outcomes of examples, which are the index."""
    columns = zip(some.index, some.score, some.tokens, some.cut_off, strict=True)
    return [Outcome(str(example), score, length=length, cut=float(cut)) for example, score, length, cut in columns]


def to_base(found: pd.DataFrame) -> pd.DataFrame:
    """The difference of each value-aware or per-head policy to its base, on the same examples.

    Budget `all`: each example's mean over the budgets. p_holm: p corrected for all rows with this budget.
    """
    rows: list[dict[str, Any]] = []
    policies = found.assign(example=found.task + " " + found.example.astype(str)).groupby("policy")
    scores = {name: some.pivot(index="example", columns="budget", values="score") for name, some in policies}
    for combined, base in PAIRS.items():
        if combined not in scores or base not in scores:
            continue
        ours, theirs = scores[combined], scores[base]
        budgets = sorted({*ours.columns} & {*theirs.columns})
        for chosen in [*([budget] for budget in budgets), budgets]:
            both = pd.concat({"ours": ours[chosen], "base": theirs[chosen]}, axis=1).dropna()
            own, other = both["ours"].mean(axis=1), both["base"].mean(axis=1)
            less = paired_difference(other.tolist(), own.tolist())
            label = "all" if len(chosen) > 1 else int(chosen[0])
            means = {"n": len(both), "score": own.mean(), "base_score": other.mean()}
            rows.append({"policy": combined, "base": base, "budget": label, **means})
            rows[-1] |= {"difference": less.mean, "low": less.low, "high": less.high, "p": less.p}
    overall = [row for row in rows if row["budget"] == "all"]
    for row, p in zip(overall, holm([row["p"] for row in overall]), strict=True):
        row["p_holm"] = p
    return pd.DataFrame(rows)


def claims(runs: Path, model: str) -> pd.DataFrame:
    """The claims of the papers, decided from the needle runs of a model: a row for each comparison."""
    rows = []
    known = {table: groups for table, groups in CLAIMS.items() if (runs / table).is_dir()}
    for table, (names, overrides) in ((table, group) for table, groups in known.items() for group in groups):
        results = load_results(runs / table)
        fields = {**overrides, **_task_fields(results[0]), "model": model}
        claims_of = [claim for paper in PAPERS for claim in read_claims(paper, fields)]
        for claim in (claim for claim in claims_of if claim.name in names):
            found = decide(claim, results)
            first = {"claim": claim.name, "words": f"{claim.claim} ({claim.source})", "verdict": found.verdict}
            for one in found.comparisons:
                less = one.difference
                interval = {"difference": less.mean, "low": less.low, "high": less.high, "n": less.n}
                rows.append({**first, "table": table, "comparison": one.where, "needed": one.gain, **interval})
            if not found.comparisons:
                rows.append({**first, "table": table})
    return pd.DataFrame(rows)


def _task_fields(run: Result) -> dict[str, Any]:
    """The fields of the task that a pack's runs share and that differ from the task's file."""
    return {f"task.{key}": run.identity["task"][key] for key in ("repeats",) if f"task.{key}" in run.naming.changed}


def leaderboard(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each policy and budget: the score of every task, their mean, and the share of the full cache's bytes.

    Only tasks of which the full cache solves 0.3 or more. A policy without one of these tasks has no average and is
    left out.
    """
    full = table[table.policy == "full"].set_index("task").score
    solved = table[table.task.isin(full.index[full >= SOLVED])]
    keys = ["policy", "budget"]
    scores = solved.pivot_table(index=keys, columns="task", values="score", dropna=False).dropna(how="any")
    scores.insert(0, "average", scores.mean(axis=1))
    scores.insert(1, "share_of_full", solved.groupby(keys, dropna=False).share_of_full.mean())
    scores.insert(2, "n", solved.groupby(keys, dropna=False).n.min())
    return scores.reset_index().sort_values(["average", "policy"], ascending=[False, True], ignore_index=True)


def score_figure(table: pd.DataFrame, x: str, file: Path, title: str, xlabel: str) -> None:
    """Score (or perplexity) against budget or bytes, a line for each policy."""
    measure = "score" if "score" in table else "nll"
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for index, (policy, some) in enumerate(table.groupby("policy", sort=False)):
        some = some.sort_values(x)
        if policy == "full":
            axes.axhline(some[measure].iloc[0], color="black", linestyle="--", linewidth=1, label="full")
            continue
        marker = "osv^D<>pX*hPd"[index % 13]
        (line,) = axes.plot(some[x], some[measure], marker=marker, linewidth=1.2, markersize=4, label=policy)
        if "low" in some:
            axes.vlines(some[x], some.low, some.high, line.get_color(), linewidth=0.8, alpha=0.35)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel(xlabel)
    axes.set_ylabel("score (share found)" if measure == "score" else "NLL in nats per token (lower is better)")
    if measure == "score":
        axes.set_ylim(-0.03, 1.05)
    axes.set_title(title, fontsize=9, loc="left")
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    save(figure, file)


def leaderboard_figure(table: pd.DataFrame, file: Path, title: str) -> None:
    """The average of each policy at the largest budget as a bar, its tasks as points, sorted."""
    own = table[table.budget.isna() | (table.budget == table.budget.max())].reset_index(drop=True)
    figure, axes = plt.subplots(figsize=(6.4, 0.21 * len(own) + 1), layout="constrained")
    axes.barh(own.index, own.average, color="lightgrey", label="average")
    for index, task in enumerate(own.columns[list(own.columns).index("n") + 1 :]):
        axes.plot(own[task], own.index, "osv^D<>"[index], markersize=4, label=str(task).removeprefix("ruler_"))
    shares = own.share_of_full.map("{:.0%}".format)
    axes.set_yticks(own.index, own.policy + ", " + shares, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("score; beside each policy its share of the full cache's bytes", fontsize=8)
    axes.set_title(title, fontsize=9, loc="left")
    axes.legend(fontsize=7, loc="lower right")
    save(figure, file)


def bytes_figure(scores: pd.DataFrame, likelihoods: pd.DataFrame, file: Path) -> None:
    """Needles found, and perplexity of a book, against the bytes of the cache."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
    for axes, table, measure in ((left, scores, "score"), (right, likelihoods, "nll")):
        for index, policy in enumerate(BYTES):
            own = table[table.policy == policy]
            if not own.empty:
                values = own[measure] if measure == "score" else own[measure].map(math.exp)
                axes.plot(own.cache_mib, values, "osv^D<>pX"[index], markersize=6, label=policy)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("cache held, MiB")
    left.set_ylabel("needles found")
    right.set_ylabel("perplexity (lower is better)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    save(figure, file)


def depth_maps(found: pd.DataFrame, policies: list[str], file: Path) -> None:
    """For each policy a map of needle depth against budget: the share of needles found."""
    own = found[found.policy.isin(policies)]
    budgets = sorted(int(budget) for budget in own.budget.dropna().unique())
    depths = sorted(own.depth.unique())
    figure, grid = plt.subplots(1, len(policies), figsize=(1.35 * len(policies) + 0.6, 3), sharey=True)
    for axes, policy in zip(grid, policies, strict=True):
        some = own[own.policy == policy]
        cells = [
            [some[(some.depth == d) & ((some.budget == b) | some.budget.isna())].score.mean() for b in budgets]
            for d in depths
        ]
        axes.imshow(cells, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(budgets)), budgets, rotation=90, fontsize=7)
        axes.set_title(policy, fontsize=8)
    grid[0].set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths], fontsize=7)
    grid[0].set_ylabel("depth of the needle", fontsize=8)
    figure.supxlabel("budget (tokens per KV head); yellow: found, purple: lost", fontsize=8)
    figure.tight_layout()
    save(figure, file)


def difference_figure(table: pd.DataFrame, file: Path, title: str) -> None:
    """Differences to the base policy over all budgets, with their intervals."""
    own = table[table.budget == "all"].reset_index(drop=True)
    figure, axes = plt.subplots(figsize=(6.4, 0.32 * len(own) + 1.2), layout="constrained")
    spread = [own.difference - own.low, own.high - own.difference]
    axes.errorbar(own.difference, own.index, xerr=spread, fmt="o", markersize=4, capsize=2, linewidth=1)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(own.index, own.policy, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("score less the base policy's, same examples and budgets (95% interval)", fontsize=8)
    axes.set_title(title, fontsize=9, loc="left")
    save(figure, file)


def save(figure: plt.Figure, file: Path) -> None:
    """Write a figure without a date, so that equal runs give equal files."""
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Write all tables and figures for which there are runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="results/MODEL")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    found = samples(given.runs)
    found.round(6).to_csv(given.output / "samples.csv.gz", index=False, compression={"method": "gzip", "mtime": 0})
    claims(given.runs, given.output.name).round(4).to_csv(given.output / "claims.csv", index=False)
    tables = {str(name): summary(some) for name, some in found.groupby("table", sort=False)}
    for name, table in tables.items():
        table.round(4).to_csv(given.output / f"{name}.csv", index=False)
        if name in ("ruler", "ruler_context"):
            averages = leaderboard(table)
            averages.round(4).to_csv(given.output / f"{name}_average.csv", index=False)
            title = f"RULER, n = {averages.n.min()} per task, {averages.budget.max():.0f} tokens per KV head and layer"
            leaderboard_figure(averages, given.output / f"{name}_average.svg", title)
    budget = "budget (tokens per KV head and layer)"
    if "needles" in tables:
        needles = found[found.table == "needles"]
        shown = summary(needles[needles.policy.isin(SHOWN)])
        title = f"Needles, question in the prompt, n = {int(shown.n.min())}"
        score_figure(shown, "budget", given.output / "needles.svg", title, budget)
        depth_maps(needles, MAPS, given.output / "depths.svg")
        differences = to_base(needles)
        differences.round(4).to_csv(given.output / "differences.csv", index=False)
        difference_figure(differences, given.output / "differences.svg", "Value-aware and per-head variants")
    if "ruler" in tables:
        differences = to_base(found[found.table == "ruler"])
        differences.round(4).to_csv(given.output / "ruler_differences.csv", index=False)
        difference_figure(differences, given.output / "ruler_differences.svg", "Variants of policies on RULER")
    if "perplexity" in tables:
        file = given.output / "perplexity.svg"
        score_figure(tables["perplexity"], "cache_mib", file, "Moby Dick, blocks of 128 tokens", "cache, MiB")
    if {"needles", "perplexity_stores"} <= tables.keys():
        bytes_figure(tables["needles"], tables["perplexity_stores"], given.output / "bytes.svg")


if __name__ == "__main__":
    main()
