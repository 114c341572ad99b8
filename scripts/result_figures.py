"""The figures of a result pack, drawn from its tables: python scripts/result_figures.py results/MODEL.

`scripts/result_tables.py` writes the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kl_and_score
import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.report.figures.style import (
    FAINT,
    HUES,
    INK,
    MARKERS,
    by_factors,
    house_style,
    looks_of,
    save,
    side_by_side,
    with_intervals,
)

NEEDLES = ["full", "streamingllm", "h2o", "tova", "snapkv", "ada_snapkv", "cake", "kvec", "keydiff"]
STORES = ["full", "fp8", "int8", "int4", "nvfp4", "kivi", "turboquant", "turboquant_b3"]
EVICTED = ["snapkv", "kvzip", "snapkv_fp8", "kvzip_fp8"]
MAPS = ["full", "streamingllm", "h2o", "tova", "snapkv", "cake", "kvec"]
ALLOCATIONS = "uniform", "AdaKV", "CAKE's", "global"


def figures(pack: Path) -> Iterator[tuple[str, Figure]]:
    """The name and the figure of everything that a pack has tables for."""
    tables = {file.stem: pd.read_csv(file) for file in sorted(pack.glob("*.csv"))}
    if not (pack / "pack.yaml").exists():
        yield "stores", behind_evictions(tables["stores"])  # of the pocket model; `kvbench plot` draws its others
        return
    title = yaml.safe_load((pack / "pack.yaml").read_text(encoding="utf-8"))["title"]
    if "ruler_average" in tables:
        yield "ruler_average", averages(tables["ruler_average"], f"{title}, RULER at 2,048 tokens")
    if "allocations_average" in tables:
        yield "allocations", allocations(tables["allocations_average"], title)
    for table in ("ruler_context", "needles_context"):
        if table in tables and tables[table].task.nunique() == 1:
            yield table, by_policy(tables[table], f"{title}, question unknown when the prompt is compressed")
    if "needles" in tables:
        yield "needles", curves(tables["needles"], f"{title}: one number in 2,048 tokens, question known")
    for name in ("differences", "ruler_differences"):
        if name in tables:
            yield name, differences(tables[name], f"{title}, {'RULER' if 'ruler' in name else 'one number'}")
    if {"needles", "perplexity_stores"} <= tables.keys():
        found = pd.concat([tables["needles"], *([tables["stores"]] if "stores" in tables else [])])
        yield "bytes", held(found, tables["perplexity_stores"], title)
    if "perplexity" in tables:
        yield "perplexity", likelihoods(tables["perplexity"], f"{title}, Moby Dick, evicted every 128 tokens")
    if "kl" in tables:
        yield "kl_and_score", kl_and_score.figure(tables["kl"], tables["kl_rank"], title)
    samples = pd.read_csv(pack / "samples.csv.gz")
    needles = samples[(samples.table == "needles") & samples.policy.isin(MAPS)]
    if needles.policy.nunique() == len(MAPS):
        yield "depths", depth_maps(needles, f"{title}: one number in 2,048 tokens, by depth")


def points(index: int, **more: object) -> dict[str, Any]:
    """How the points of one kind look."""
    colour = HUES[index % len(HUES)]
    return {"marker": MARKERS[index], "color": colour, "markersize": 4, "linestyle": "none", **more}


def ends_of(table: pd.DataFrame, low: str = "low", high: str = "high") -> tuple[pd.Series, pd.Series]:
    """The ends of intervals; NaN where there is none."""
    return table[low].astype(float), table[high].astype(float)


def finished(figure: Figure, axes: Axes, title: str) -> Figure:
    """The figure with its title, and a legend of all policies below it."""
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    handles, labels = axes.get_legend_handles_labels()
    most = max(1, 112 // (9 + max(map(len, labels), default=0)))
    columns = -(-len(labels) // max(1, -(-len(labels) // most)))  # rows of equal length
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, columns))
    return figure


def averages(table: pd.DataFrame, title: str) -> Figure:
    """The average of each policy at 512 tokens, with its interval, and the scores of its tasks."""
    own = table[table.budget.isna() | (table.budget == 512)].reset_index(drop=True)
    figure, axes = plt.subplots(figsize=(7, 0.185 * len(own) + 1.3), layout="constrained")
    tasks = [name for name in table.columns if name.startswith("ruler_") and not name.endswith(("_low", "_high"))]
    for index, task in enumerate(tasks):
        label = task.removeprefix("ruler_")
        axes.plot(own[task], own.index, MARKERS[index], color=HUES[index], markersize=4, label=label, alpha=0.75)
    look = {"marker": "|", "color": INK, "markersize": 7, "linestyle": "none"}
    label = "average of the tasks, 95% interval"
    with_intervals(axes, own.average, own.index, ends_of(own), {**look, "label": label}, of="x")
    shares = own.share_of_full.map(lambda share: "" if pd.isna(share) else f", {share:.0%}")
    axes.set_yticks(own.index, own.policy + shares, fontsize=7)
    axes.set_ylim(len(own) - 0.4, -0.6)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("score; beside a policy: bytes held, of the full cache's in bfloat16")
    return finished(figure, axes, f"{title}, budget 512, question known, n = {own.n.min()} per task")


def allocations(table: pd.DataFrame, title: str) -> Figure:
    """Mean scores with intervals: a panel for each budget, a group for each allocation, a marker for each score."""
    budgets = sorted(table.budget.unique())
    size = 1.2 + 3.4 * len(budgets)
    figure, grid = plt.subplots(1, len(budgets), figsize=(size, 3.5), sharey=True, squeeze=False, layout="constrained")
    scores = [name for name in table["score of"].unique() if name not in table.policy.unique()]
    for axes, budget in zip(grid[0], budgets, strict=True):
        own = table[table.budget == budget]
        for number, score in enumerate(scores):
            some = own[(own["score of"] == score) & own.allocation.isin(ALLOCATIONS)]
            x = [ALLOCATIONS.index(name) + 0.14 * (number - (len(scores) - 1) / 2) for name in some.allocation]
            look = points(number, label=score, markersize=5)
            with_intervals(axes, x, some["mean"], ends_of(some), look)
        for policy, style in (("full", (0, (6, 2))), ("random", ":")):
            known = own[own.policy == policy]["mean"].item()
            axes.axhline(known, color=FAINT, linestyle=style, linewidth=1, label=policy)
        axes.set_xticks(range(len(ALLOCATIONS)), ALLOCATIONS)
        axes.set_title(f"budget {budget:.0f}, n = {own.n.min():.0f} per task", loc="left")
        axes.set_xlabel("allocation of the budget to layers and heads")
    grid[0][0].set_ylim(-0.02, 1)
    grid[0][0].set_ylabel("mean score of three tasks of RULER")
    return finished(figure, grid[0][0], f"{title}, RULER, question known: one score under four allocations")


def by_policy(table: pd.DataFrame, title: str) -> Figure:
    """A row for each policy, a marker with an interval for each budget."""
    budgets = sorted(table.budget.dropna().unique())
    own = table[table.budget.notna()]
    order = own.groupby("policy").score.mean().sort_values(ascending=False).index
    figure, axes = plt.subplots(figsize=(7, (0.2 + 0.08 * len(budgets)) * len(order) + 1.4), layout="constrained")
    for index, budget in enumerate(budgets):
        some = own[own.budget == budget].set_index("policy")
        y = [order.get_loc(policy) + 0.2 * (index - (len(budgets) - 1) / 2) for policy in some.index]
        with_intervals(axes, some.score, y, ends_of(some), points(index, label=f"budget {budget:.0f}"), of="x")
    full = table[table.policy == "full"]
    axes.axvline(full.score.iloc[0], color=FAINT, linestyle=(0, (6, 2)), linewidth=1, label="full")
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlim(-0.02, 1.02)
    fewest = f"n = {own.n.min():.0f}" + (f" to {own.n.max():.0f}" if own.n.min() < own.n.max() else "")
    axes.set_xlabel(f"score on {table.task.iloc[0]} with its 95% interval, {fewest}")
    return finished(figure, axes, title)


def curves(table: pd.DataFrame, title: str) -> Figure:
    """Score against budget, a line for each policy; points of equal budgets stand beside each other."""
    policies = [policy for policy in NEEDLES if policy in {*table.policy}]
    looks = looks_of(policies)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    budgets = sorted(table[table.policy.isin(policies)].budget.dropna().unique())
    by_factors(axes, (budgets[0], budgets[-1]))
    axes.set_xticks(budgets, [f"{budget:.0f}" for budget in budgets])
    axes.set_xlim(budgets[0] / 1.15, 1.15 * budgets[-1])
    full = table[table.policy == "full"]
    axes.axhline(full.score.iloc[0], color=INK, linestyle=(0, (6, 2)), linewidth=1, label="full")
    evicting = [policy for policy in policies if policy != "full"]
    for policy, shift in zip(evicting, side_by_side(len(evicting), 120), strict=True):
        some = table[table.policy == policy].sort_values("budget")
        look = {**looks[policy].plot, "label": policy, "markersize": 4}
        with_intervals(axes, some.budget, some.score, ends_of(some), look, shift)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("budget in tokens per KV head and layer (markers beside each other have the same budget)")
    axes.set_ylabel("share of the numbers found")
    return finished(figure, axes, f"{title}, n = {table.n.max():.0f}")


def differences(table: pd.DataFrame, title: str) -> Figure:
    """Differences to the base policy over all budgets, with their intervals."""
    own = table[(table.budget == "all") & (table.task == "all")].reset_index(drop=True)
    figure, axes = plt.subplots(figsize=(7, 0.24 * len(own) + 1.2), layout="constrained")
    with_intervals(axes, own.difference, own.index, ends_of(own), points(0), of="x")
    axes.axvline(0, color=FAINT, linewidth=0.8)
    axes.set_yticks(own.index, own.policy + " - " + own.base, fontsize=8)
    axes.set_ylim(len(own) - 0.4, -0.6)
    axes.set_xlabel("difference in score, mean over the budgets, 95% interval (not corrected)")
    return finished(figure, axes, f"{title}, question known: variants less their bases")


def held(scores: pd.DataFrame, texts: pd.DataFrame, title: str) -> Figure:
    """Needles found, and nats lost on a book, against the bytes of the cache."""
    known = {*scores.policy} & {*STORES, *EVICTED} | {*texts.policy} & {*STORES, *EVICTED}
    policies = [policy for policy in (*STORES, *EVICTED) if policy in known]
    figure, grid = plt.subplots(1, 2, figsize=(7.4, 3.6), layout="constrained")
    shifts = side_by_side(len(policies), 60)
    for axes, table, measure in ((grid[0], scores, "score"), (grid[1], texts, "vs_full")):
        for index, (policy, shift) in enumerate(zip(policies, shifts, strict=True)):
            own = table[table.policy == policy].sort_values("cache_mib")
            own = own.drop_duplicates("budget")
            value = own[measure].fillna(0.0) if policy == "full" else own[measure]
            ends = ("low", "high") if measure == "score" else ("vs_full_low", "vs_full_high")
            look = points(index, markersize=5, label=policy)
            look |= {"markerfacecolor": "white"} if policy in EVICTED else {}
            with_intervals(axes, own.cache_mib, value, ends_of(own, *ends), look, shift)
        sizes = table[table.policy.isin(policies)].cache_mib
        by_factors(axes, (sizes.min(), sizes.max()))
        axes.margins(x=0.1)
        axes.set_xlabel("cache held, MiB")
    grid[0].set_ylim(-0.03, 1.03)
    grid[0].set_ylabel("share of the numbers found")
    grid[0].set_title(f"one number in 2,048 tokens, n = {scores.n.max():.0f}", loc="left")
    grid[1].axhline(0, color=FAINT, linewidth=0.8)
    grid[1].set_ylabel("nats per token more than full")
    grid[1].set_title(f"Moby Dick, n = {texts.n.max()}", loc="left")
    return finished(figure, grid[0], f"{title}: stores (filled), evictions at several budgets (hollow)")


def behind_evictions(table: pd.DataFrame) -> Figure:
    """NLL of answers against bytes, for stores behind SnapKV and CAKE: 4 bits filled, 2 bits hollow."""
    figure, grid = plt.subplots(1, 2, figsize=(7.4, 3.8), sharey=True, layout="constrained")
    kinds = ["16 bits", "kivi_g32_r32", "ott_g32_r32", "kcvc_g32_r32", "gear_g32", "zipcache"]
    shifts = side_by_side(len(kinds), 80)
    for axes, base in zip(grid, ("snapkv", "cake"), strict=True):
        for index, kind in enumerate(kinds):
            for end in ("_int4", "") if index else ("",):
                own = table[(table.policy == (f"{base}_{kind}{end}" if index else base)) & (table.share < 1)]
                own = own.sort_values("prompt_kib")
                look = {"color": HUES[index], "marker": MARKERS[index], "markersize": 5, "linewidth": 1}
                look |= {"label": f"{kind}{end}", "markerfacecolor": HUES[index] if end or not index else "white"}
                look["linestyle"] = "-" if end or not index else ":"
                ends = ends_of(own, "nll_vs_full_low", "nll_vs_full_high")
                with_intervals(axes, own.prompt_kib, own.nll_vs_full, ends, look, shifts[index])
        axes.set_title(f"behind {base}", loc="left")
        axes.margins(x=0.1)
        axes.set_xlabel("KiB held after the prompt")
    grid[0].set_ylabel("nats per token of the answer more than full")
    title = f"Pocket model, quantized stores behind an eviction, n = {table[table.share < 1].n.max()}"
    return finished(figure, grid[0], f"{title}; filled: 4 bits, hollow: 2")


def likelihoods(table: pd.DataFrame, title: str) -> Figure:
    """Nats per token more than the full cache against bytes. `random`, which loses many times as much, is left out."""
    policies = [name for name in table.policy.unique() if name not in ("full", "random")]
    looks = looks_of(policies)
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for policy in policies:
        own = table[table.policy == policy].sort_values("cache_mib")
        look = {"label": policy, "markersize": 4, **looks[policy].plot}
        with_intervals(axes, own.cache_mib, own.vs_full, ends_of(own, "vs_full_low", "vs_full_high"), look)
    axes.axhline(0, color=FAINT, linewidth=0.8)
    sizes = table[table.policy.isin(policies)].cache_mib
    by_factors(axes, (sizes.min(), sizes.max()))
    axes.set_xlabel("cache held, MiB")
    axes.set_ylabel("nats per token more than full")
    return finished(figure, axes, f"{title}, n = {table.n.max()}; random is left out")


def depth_maps(own: pd.DataFrame, title: str) -> Figure:
    """For each policy a map of needle depth against budget: the share of needles found."""
    budgets = sorted(int(budget) for budget in own.budget.dropna().unique())
    depths = sorted(own.depth.unique())
    size = (1.1 * len(MAPS) + 0.9, 3.1)
    figure, grid = plt.subplots(1, len(MAPS), figsize=size, sharey=True, layout="constrained")
    for axes, policy in zip(grid, MAPS, strict=True):
        some = own[own.policy == policy]
        cells = [
            [some[(some.depth == d) & ((some.budget == b) | some.budget.isna())].score.mean() for b in budgets]
            for d in depths
        ]
        picture = axes.imshow(cells, vmin=0, vmax=1, aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(len(budgets)), budgets, rotation=90, fontsize=7)
        axes.set_title(policy, fontsize=8)
    grid[0].set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths], fontsize=7)
    grid[0].set_ylabel("depth of the number", fontsize=8)
    n = own.groupby(["policy", "budget", "depth"]).size().max()
    figure.colorbar(picture, ax=list(grid), label=f"share found, n = {n} per cell", pad=0.01)
    figure.supxlabel("budget (tokens per KV head)", fontsize=8)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    return figure


def main() -> None:
    """Draw all figures of a pack, and remove those that are not drawn any more."""
    mpl.use("Agg")
    pack = Path(sys.argv[1])
    with house_style():
        drawn = set()
        for name, figure in figures(pack):
            save(figure, pack / f"{name}.svg")
            plt.close(figure)
            drawn.add(name)
    for file in pack.glob("*.svg") if (pack / "pack.yaml").exists() else ():
        if file.stem not in drawn:
            file.unlink()
            print(f"{file}: removed, it is not drawn any more")


if __name__ == "__main__":
    main()
