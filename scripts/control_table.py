"""Do scores or budgets decide? The table and the figure of the control experiment.

python scripts/control_table.py results/runs/qwen25_coder_05b/control -o results/qwen25_coder_05b

The runs are those of conf/experiment/results/qwen25_coder_05b/control.yaml; those with fewer than `--n` examples are
left out. `control.csv` has a row for each score and allocation: the score of each task with its 95% interval, the mean,
and its difference from the uniform allocation of the same score, paired over all prompts, with Holm's correction.
`control.svg` shows the means.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from kvbench.results.result import Result, load_results
from kvbench.results.statistics import corrected, mean_interval, paired_difference, stratified_interval

SCORES = {
    "SnapKV": ("snapkv", "ada_snapkv", "p2a_snapkv", "global_snapkv"),
    "CAOTE on SnapKV": ("caote_snapkv", "ada_caote_snapkv", "p2a_caote_snapkv", "global_caote_snapkv"),
    "DefensiveKV": ("defensivekv_alloc_uniform", "defensivekv", "p2a_defensivekv", "layer_defensivekv"),
    "DefensiveKV, official": ("defensivekv_alloc_uniform", "defensivekv", "p2a_defensivekv", "layer_defensivekv"),
}
ALLOCATIONS = "uniform", "AdaKV", "CAKE's", "global"
OTHERS = {"full": "full", "random": "random", "random, newest 32 kept": "random"}


def key_of(run: Result) -> list[tuple[str, str]]:
    """The score and the allocation of a run, as rows of the table name them."""
    official, recent = "official=true" in str(run.line), "recent=32" in str(run.line)
    found = []
    for score, policies in SCORES.items():
        if run.policy in policies and ("official" in score) == (official and "defensive" in run.policy):
            found.append((score, ALLOCATIONS[policies.index(run.policy)]))
    if run.policy in OTHERS.values():
        found.append((f"{run.policy}, newest 32 kept" if recent else run.policy, ""))
    return found


def table(runs: list[Result]) -> pd.DataFrame:
    """A row for each score and allocation."""
    by_key: dict[tuple[str, str], dict[str, Result]] = {}
    for run in runs:
        for key in key_of(run):
            by_key.setdefault(key, {})[run.task] = run
    order = [*((score, allocation) for score in SCORES for allocation in ALLOCATIONS), *((name, "") for name in OTHERS)]
    keys = [key for key in order if key in by_key]
    scores = {
        key: {task: {one.prompt_hash: float(one.score or 0) for one in run.outcomes} for task, run in found.items()}
        for key, found in by_key.items()
    }
    tasks = sorted({run.task for run in runs})
    compared = {}
    for score, allocation in keys:
        if allocation not in ("", "uniform"):
            base, own = scores[score, "uniform"], scores[score, allocation]
            pairs = [(base[task][prompt], own[task][prompt]) for task in tasks for prompt in base[task]]
            compared[score, allocation] = paired_difference(*zip(*pairs, strict=True))
    compared = corrected(compared)
    rows = []
    for key in keys:
        own, first = scores[key], next(iter(by_key[key].values()))
        row: dict[str, object] = {"policy": first.policy, "score of": key[0], "allocation": key[1]}
        row["budget"] = first.budget
        for task in tasks:
            values = list(own[task].values())
            interval = mean_interval(values)
            row |= {task: sum(values) / len(values), f"{task}_low": interval.low, f"{task}_high": interval.high}
        groups = [list(own[task].values()) for task in tasks]
        interval = stratified_interval(groups)
        mean = sum(sum(group) / len(group) for group in groups) / len(groups)
        row |= {"mean": mean, "mean_low": interval.low, "mean_high": interval.high, "n": len(groups[0])}
        if key in compared:
            found = compared[key]
            row |= {"vs_uniform": found.mean, "vs_uniform_low": found.low, "vs_uniform_high": found.high}
            row |= {"p_holm": found.p}
        rows.append(row | {"run_id": by_key[key][tasks[0]].run_id})
    return pd.DataFrame(rows)


def draw(rows: pd.DataFrame, file: Path) -> None:
    """Mean scores with intervals: a group for each allocation, a marker for each score."""
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for number, (score, marker) in enumerate(zip(SCORES, "osD^", strict=True)):
        own = rows[rows["score of"] == score]
        x = [ALLOCATIONS.index(name) + 0.12 * (number - 1.5) for name in own["allocation"]]
        ends = [own["mean"] - own["mean_low"], own["mean_high"] - own["mean"]]
        axes.errorbar(x, own["mean"], yerr=ends, fmt=marker, label=score, capsize=2)
    for name, style in (("full", "-"), ("random", ":")):
        axes.axhline(float(rows[rows["score of"] == name]["mean"].iloc[0]), color="0.5", linestyle=style, label=name)
    axes.set_xticks(range(len(ALLOCATIONS)), [f"{name} allocation" for name in ALLOCATIONS])
    axes.set_ylim(0, 1)
    axes.set_ylabel("mean score of three tasks")
    axes.set_title(f"RULER at 2,048 tokens, budget {int(rows['budget'].max())}, n = {int(rows['n'].max())} per task")
    figure.legend(fontsize=8, ncols=6, loc="outside lower center")
    figure.savefig(file)


def main() -> None:
    """Write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the runs")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of control.csv and control.svg")
    parser.add_argument("--n", type=int, default=50, help="examples of each task")
    parser.add_argument("--budget", type=int, default=512)
    given = parser.parse_args()
    runs = [run for run in load_results(Path(given.folder)) if run.n >= given.n and run.budget in (given.budget, None)]
    rows = table(runs)
    rows.to_csv(given.output / "control.csv", index=False, float_format="%.4g")
    plt.style.use(Path(__file__).parents[1] / "kvbench" / "report" / "figures" / "kvbench.mplstyle")
    plt.rcParams["svg.hashsalt"] = "kvbench"
    draw(rows, given.output / "control.svg")


if __name__ == "__main__":
    main()
