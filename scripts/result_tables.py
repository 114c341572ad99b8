"""The tables of a result pack, computed from its samples.csv.gz.

python scripts/result_tables.py results/MODEL [--runs RUNS]

Writes one tidy CSV for each table, the averages over RULER's tasks, the paired differences to base policies, and the
decided claims. --runs: first take up the finished runs of RUNS/TABLE/, which replace
samples of the same table, policy, budget, task and example. `scripts/result_figures.py` draws the figures.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kl_and_score
import pandas as pd
import yaml

from kvbench.papers.claims import PAPERS, Claim, ClaimComparison, judge, read_claims
from kvbench.results.changes import changes
from kvbench.results.statistics import (
    FEWEST,
    Difference,
    corrected,
    holm,
    mean_interval,
    paired_difference,
    stratified_interval,
)
from kvbench.results.summary import Outcome

PAIRS = {  # CAOTE's H2O keeps no recent window
    f"{value}_{base}": "h2o_norecent" if base == "h2o" and value != "ada" else base
    for base in ("snapkv", "h2o", "tova", "roco", "pyramidkv", "knorm", "keydiff", "cake", "kvec")
    for value in ("caote", "fastcaote", "ada")
} | dict.fromkeys(["cake", "chunkkv_snapkv", "critical_snapkv", "defensivekv", "layer_defensivekv"], "snapkv")
TASKS = "ruler_niah_multikey_2", "ruler_vt", "ruler_niah_multikey_3"
ON_RULER = "caote/always-task", "cake/needle-best", "cake/pyramid-not-better", "kvec/needle"
ON_NEEDLES = (*ON_RULER[:1], "caote/needle-gain", *ON_RULER[1:3], "d2o/needle", "kvec/needle")
NEAR_FULL = "cake/near-lossless-1024", "kvec/near-full-1024"
UNKNOWN = "today/kvzip-question-unknown"
CLAIMS: list[tuple[str, str, tuple[str, ...], list[int | None]]] = [  # table, task, claims, budgets
    ("needles", "niah", ON_NEEDLES, [512, 1024]),
    ("needles", "niah", NEAR_FULL, [1024]),
    *(("ruler", task, ON_RULER, [256, 512]) for task in TASKS),
    ("ruler_1024", TASKS[2], NEAR_FULL, [1024]),
    ("ruler_context", TASKS[0], (UNKNOWN,), [512, 1024]),
    ("needles_context", "niah", (UNKNOWN,), [256, 1024]),
]
"""What each table can decide. A claim about every task is decided for each of them."""
SOLVED = 0.3
"""Tasks of which the full cache solves less show nothing about a policy."""
OFFICIAL = " (official)"
CONTROL = {  # a score under four allocations of the budget
    "SnapKV": ("snapkv", "ada_snapkv", "p2a_snapkv", "global_snapkv"),
    "CAOTE on SnapKV": ("caote_snapkv", "ada_caote_snapkv", "p2a_caote_snapkv", "global_caote_snapkv"),
    "DefensiveKV": ("defensivekv_alloc_uniform", "defensivekv", "p2a_defensivekv", "layer_defensivekv"),
}
CONTROL["DefensiveKV, official"] = tuple(policy + OFFICIAL for policy in CONTROL["DefensiveKV"])
ALLOCATIONS = "uniform", "AdaKV", "CAKE's", "global"
OTHERS = "full", "random", "random (recent=32)", "streamingllm"
KEY = ["table", "policy", "budget", "task", "example"]


# --- samples ---------------------------------------------------------------------------------------------------------
def samples(runs: Path) -> pd.DataFrame:
    """A row for each example of the finished runs in RUNS/TABLE/: scores, bytes, kept tokens, output, prompt hash."""
    rows = []
    for file in sorted(runs.glob("*/*/samples.jsonl")):
        config = yaml.safe_load((file.parent / "config.yaml").read_text(encoding="utf-8"))
        if config["identity"]["task"].get("divergence"):
            continue  # fed the answer of the full cache, it has no score: scripts/kl_and_score.py
        for line in file.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            if sample["error"]:
                continue  # such a run has no score
            kept = [heads for layer in sample["kept_tokens"] for heads in layer]
            likelihood = sample.get("likelihood") or {}
            rows.append(
                {
                    "table": file.parent.parent.name,
                    "policy": file.parent.name.split("-")[1] + variant(config),  # with its store: snapkv_fp8
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
                    "prompt_hash": sample["prompt_hash"],
                    "output": sample["output"],
                }
            )
    return pd.DataFrame(rows)


def variant(config: dict[str, Any]) -> str:
    """The changed fields of a policy's parts as a remark, such as ` (official)` or ` (recent=32)`."""
    words = []
    for name in config["naming"]["changed"]:
        _, *path = name.split(".")
        if name.startswith("policy.") and path[0] != "schedule":
            value = config["identity"]["policy"]
            for key in path:
                value = value[key]
            words.append(path[-1] if value is True else f"{path[-1]}={value}")
    return f" ({', '.join(words)})" if words else ""


def taken_up(known: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """The known samples and the new ones, which replace those of the same example."""
    both = pd.concat([known, new], ignore_index=True)
    return both.drop_duplicates(KEY, keep="last").sort_values("table", kind="stable", ignore_index=True)


# --- tables ----------------------------------------------------------------------------------------------------------
def summary(found: pd.DataFrame) -> pd.DataFrame:
    """Mean score (95% interval), bytes and difference to `full` on the same examples, for each run.

    p: of this difference; p_holm: corrected for all rows with the task of the row. Neither they nor an interval are
    given where they would be a bootstrap of fewer than FEWEST examples.
    """
    rows, compared = [], {}
    for (task, policy, budget), some in found.groupby(["task", "policy", "budget"], dropna=False, sort=False):
        full = found[(found.policy == "full") & (found.task == task)].set_index("example")
        shared = [example for example in some.example if example in full.index]
        own = some.set_index("example")
        measure = "score" if some.score.notna().any() else "nll"
        interval = mean_interval(some[measure].tolist()) if measure == "score" else None
        less = paired_difference(full.loc[shared, measure].tolist(), own.loc[shared, measure].tolist())
        tested = policy != "full" and len(shared) > 1 and (less.method == "tango" or len(shared) >= FEWEST)
        if tested:
            compared[task, policy, budget] = less
        rows.append(
            {
                "task": task,
                "policy": policy,
                "budget": budget,
                "n": len(some),
                measure: some[measure].mean(),
                **({"low": interval.low, "high": interval.high} if interval else {}),
                "vs_full": less.mean if policy != "full" else None,
                "vs_full_low": less.low if tested else None,
                "vs_full_high": less.high if tested else None,
                "p": less.p if tested else None,
                "p_holm": None,
                **(answers(full.loc[shared], own.loc[shared]) if interval else {}),
                "kept_per_head": some.kept_per_head.mean(),
                "cache_mib": some.cache_bytes.mean() / 2**20,
                # of the bytes that full held on the same examples: equal bytes are equal shares
                "share_of_full": own.loc[shared, "cache_bytes"].sum() / full.loc[shared, "cache_bytes"].sum(),
                "run_id": some.run_id.iloc[-1],
            }
        )
    for task in found.task.unique():
        own_task = corrected({key: one for key, one in compared.items() if key[0] == task})
        for row in rows:
            key = row["task"], row["policy"], row["budget"]
            row["p_holm"] = own_task[key].p if key in own_task else row["p_holm"]
    return pd.DataFrame(rows).sort_values(["task", "budget", "policy"], ignore_index=True)


def answers(full: pd.DataFrame, own: pd.DataFrame) -> dict[str, float]:
    """The answers of a policy beside those of `full` to the same examples, as `kvbench results collect` counts them.

    lost, gained, tokens_vs_full: see `Changes`. tokens: mean length. cut_off: share that reached max_new_tokens.
    kv_footprint: entries held, over all fed tokens, as a share of the full cache's. Nothing if lengths are unknown.
    """
    if "tokens" not in own or own.tokens.isna().all() or full.tokens.isna().all():
        return {}
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
    columns = zip(some.index, some.score, some.tokens, some.cut_off.astype(float), strict=True)
    return [Outcome(str(example), score, length=length, cut=cut) for example, score, length, cut in columns]


def to_base(found: pd.DataFrame) -> pd.DataFrame:
    """The difference of each value-aware, per-head or per-layer policy to its base, on the same examples.

    Budget `all`: each example's mean over the budgets. Task `all`: the examples of all tasks. p_holm: p corrected for
    all rows with this task and this budget.
    """
    tasks = found.task.unique()
    parts = [("all", found), *((task, found[found.task == task]) for task in tasks if len(tasks) > 1)]
    rows = [{"task": task, **row} for task, some in parts for row in _to_base(some)]
    for task, budget in {(row["task"], row["budget"]) for row in rows}:
        own = [row for row in rows if (row["task"], row["budget"]) == (task, budget)]
        for row, p in zip(own, holm([row["p"] for row in own]), strict=True):
            row["p_holm"] = p
    return pd.DataFrame(rows)


def _to_base(found: pd.DataFrame) -> list[dict[str, Any]]:
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
    return rows


def leaderboard(found: pd.DataFrame, control: pd.DataFrame | None) -> pd.DataFrame:
    """A row for each policy and budget: the mean of the tasks, its difference to `full`, and the score of every task.

    Only tasks of which the full cache solves 0.3 or more. A policy without one of these tasks, or with fewer examples
    of it than `full`, is left out. p_holm: p corrected for all rows. Policies without samples here come from the table
    `control`, which has no bytes.
    """
    full = found[found.policy == "full"].groupby("task").score.mean()
    tasks = sorted(full.index[full >= SOLVED])
    whole = found[found.policy == "full"].set_index(["task", "example"]).score
    rows, compared = [], {}
    for (policy, budget), some in found[found.task.isin(tasks)].groupby(["policy", "budget"], dropna=False):
        groups = {task: own.score.tolist() for task, own in some.groupby("task")}
        if sorted(groups) != tasks or len(some) < whole.index.isin(tasks, level="task").sum():
            continue
        interval, means = stratified_interval([*groups.values()]), {k: sum(v) / len(v) for k, v in groups.items()}
        own = some.set_index(["task", "example"])
        shared = [key for key in own.index if key in whole.index]
        if policy != "full":
            compared[policy, budget] = paired_difference(whole.loc[shared].tolist(), own.score.loc[shared].tolist())
        held = some.cache_bytes.sum() / found[(found.policy == "full") & found.task.isin(tasks)].cache_bytes.sum()
        row = {"policy": policy, "budget": budget, "average": sum(means.values()) / len(means)}
        row |= {"low": interval.low, "high": interval.high, "share_of_full": held}
        row |= {"cache_mib": some.cache_bytes.mean() / 2**20, "n": min(map(len, groups.values()))}
        for task, scores in groups.items():
            ends = mean_interval(scores)
            row |= {task: means[task], f"{task}_low": ends.low, f"{task}_high": ends.high}
        rows.append(row)
    for row in rows:
        less = corrected(compared).get((row["policy"], row["budget"]))
        if less is not None:
            row |= {"vs_full": less.mean, "vs_full_low": less.low, "vs_full_high": less.high, "p_holm": less.p}
    if control is not None:
        rows += list(_from_control(control, {(row["policy"], row["budget"]) for row in rows}, tasks))
    table = pd.DataFrame(rows).sort_values(["average", "policy"], ascending=[False, True], ignore_index=True)
    first = ["policy", "budget", "average", "low", "high", "vs_full", "vs_full_low", "vs_full_high", "p_holm"]
    first += ["share_of_full", "cache_mib", "n"]
    return table[[*first, *(name for name in table.columns if name not in first)]]


def _from_control(control: pd.DataFrame, known: set[Any], tasks: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of the control experiment that have no samples here."""
    for _, row in control.iterrows():
        if (row.policy, row.budget) not in known and pd.notna(row.budget) and row[tasks].notna().all():
            own = {"policy": row.policy, "budget": row.budget, "average": row["mean"], "n": int(row.n)}
            columns = [task + end for task in tasks for end in ("", "_low", "_high")]
            yield own | {"low": row.mean_low, "high": row.mean_high} | {name: row[name] for name in columns}


# --- one score under four allocations of the budget ------------------------------------------------------------------
def allocations(found: pd.DataFrame) -> pd.DataFrame:
    """Do scores or budgets decide? A row for each score and allocation at every budget: the mean of the tasks.

    vs_uniform: the difference from the uniform allocation of the same score, paired over all prompts, with Holm's
    correction over the rows of a budget.
    """
    rows = []
    for budget in sorted(found.budget.dropna().unique()):
        some = found[(found.budget == budget) | found.budget.isna()]
        scores = {
            policy: one.set_index(["task", "example"]).score.sort_index() for policy, one in some.groupby("policy")
        }
        named = [
            (score, allocation, policy)
            for score, policies in CONTROL.items()
            for allocation, policy in zip(ALLOCATIONS, policies, strict=True)
        ] + [(name, "", name) for name in OTHERS]
        compared: dict[str, Difference] = {}
        for score, allocation, policy in named:
            if allocation not in ("", "uniform"):
                both = pd.concat([scores[CONTROL[score][0]], scores[policy]], axis=1).dropna()
                compared[policy] = paired_difference(both.iloc[:, 0].tolist(), both.iloc[:, 1].tolist())
        compared = corrected(compared)
        for score, allocation, policy in named:
            groups = [own.tolist() for _, own in scores[policy].groupby("task")]
            interval, means = stratified_interval(groups), [sum(own) / len(own) for own in groups]
            row: dict[str, Any] = {"policy": policy, "score of": score, "allocation": allocation, "budget": budget}
            row |= {"mean": sum(means) / len(means), "low": interval.low, "high": interval.high}
            row["n"] = min(map(len, groups))
            if policy in compared:
                less = compared[policy]
                row |= {"vs_uniform": less.mean, "vs_uniform_low": less.low, "vs_uniform_high": less.high}
                row["p_holm"] = less.p
            rows.append(row)
    return pd.DataFrame(rows)


# --- claims ----------------------------------------------------------------------------------------------------------
def claims(found: pd.DataFrame) -> pd.DataFrame:
    """The claims of the papers, decided from the samples of a model: a row for each comparison, also without runs."""
    rows: list[dict[str, Any]] = []
    known = {claim.name: claim for paper in PAPERS for claim in read_claims(paper)}
    for table, task, names, budgets in CLAIMS:
        some = found[(found.table == table) & (found.task == task)]
        for claim in (known[name] for name in names if not some.empty):
            rows += _decided(replace(claim, runs={**claim.runs, "budget": budgets}), table, some)
    return pd.DataFrame(rows)


def _decided(claim: Claim, table: str, some: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The rows of a claim on one task. Comparisons without runs are named, and leave it undecided unless it fails."""
    scores = {key: one.set_index("example").score for key, one in some.groupby(["policy", "budget"], dropna=False)}
    by_name = {(policy, None if pd.isna(budget) else int(budget)): one for (policy, budget), one in scores.items()}
    compared, missing = [], []
    for first, second in claim.plans():
        budget = f" at {first.budget}" if first.budget else ""
        where = f"{first.policy} - {second.policy}{budget}"
        ours, theirs = by_name.get((first.policy, first.budget)), by_name.get((second.policy, second.budget))
        if ours is None or theirs is None:
            missing.append(where)
            continue
        both = pd.concat([theirs, ours], axis=1).dropna()
        less = paired_difference(both.iloc[:, 0].tolist(), both.iloc[:, 1].tolist())
        compared.append(ClaimComparison(where, less, claim.gain))
    verdict = judge(claim, compared, len(missing))
    shown = {"claim": claim.name, "words": f"{claim.claim} ({claim.source})", "verdict": verdict.verdict}
    shown |= {"table": table, "task": some.task.iloc[0]}
    for one in verdict.comparisons:
        less = one.difference
        numbers = {"difference": less.mean, "low": less.low, "high": less.high, "p_holm": one.p, "n": less.n}
        yield {**shown, "comparison": one.where, "needed": one.gain, **numbers}
    if compared:
        yield from ({**shown, "comparison": f"{where}: no run"} for where in missing)


def write(pack: Path, found: pd.DataFrame) -> None:
    """Write all tables of a pack."""
    claims(found).round(4).to_csv(pack / "claims.csv", index=False)
    control = pd.read_csv(pack / "control.csv") if (pack / "control.csv").exists() else None
    for name, some in found.groupby("table", sort=False):
        summary(some).round(4).to_csv(pack / f"{name}.csv", index=False)
        if name == "ruler" and some.groupby("task").policy.nunique().gt(1).all():
            leaderboard(some, control).round(4).to_csv(pack / "ruler_average.csv", index=False)
        if name == "allocations":
            allocations(some).round(4).to_csv(pack / "allocations_average.csv", index=False)
    for table, file in (("needles", "differences.csv"), ("ruler", "ruler_differences.csv")):
        own = found[found.table == table]
        differences = to_base(own[~own.policy.str.contains("(", regex=False)])
        if not differences.empty:
            differences.round(4).to_csv(pack / file, index=False)

    if (pack / kl_and_score.KL_SAMPLES).exists():
        kl_and_score.write(pack, found)


def main() -> None:
    """Take up runs if any are given, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="results/MODEL")
    parser.add_argument("--runs", type=Path, help="a folder with a folder of runs for each table")
    given = parser.parse_args()
    file = given.pack / "samples.csv.gz"
    found = pd.read_csv(file)
    if given.runs:
        new_samples = samples(given.runs)
        found = found if new_samples.empty else taken_up(found, new_samples)
        found.round(6).to_csv(file, index=False, compression={"method": "gzip", "mtime": 0})
    write(given.pack, found)


if __name__ == "__main__":
    main()
