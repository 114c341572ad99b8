"""The figures of a result pack, drawn from its tables: python scripts/result_figures.py results/MODEL.

`scripts/result_tables.py` writes the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import kl_and_score
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from kvbench.report.figures.style import FAINT, HUES, INK, MARKERS, house_style, looks_of, save

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
    if "control" in tables:
        yield "control", control(tables["control"], title)
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


Ends = tuple[pd.Series, pd.Series]


def interval(axes: Axes, x: Sequence[float], y: Sequence[float], ends: Ends, **look: object) -> None:
    """Points with vertical intervals."""
    low, high = (np.asarray(end, dtype=float) for end in ends)
    mid = np.asarray(y, dtype=float)
    spread = np.nan_to_num(np.clip([mid - low, high - mid], 0, None))
    axes.errorbar(x, mid, yerr=spread, capsize=2, elinewidth=0.8, **look)  # type: ignore[arg-type]


def labelled(figure: Figure, axes: Axes, x_label: str, y_label: str, title: str) -> Figure:
    """The figure with its labels, its title, and a legend of all policies below it."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, loc="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def averages(table: pd.DataFrame, title: str) -> Figure:
    """The average of each policy at 512 tokens, with its interval, and the scores of its tasks."""
    own = table[table.budget.isna() | (table.budget == 512)].reset_index(drop=True)
    figure, axes = plt.subplots(figsize=(7, 0.185 * len(own) + 1.3), layout="constrained")
    tasks = [name for name in table.columns if name.startswith("ruler_") and not name.endswith(("_low", "_high"))]
    for index, task in enumerate(tasks):
        label = task.removeprefix("ruler_")
        axes.plot(own[task], own.index, MARKERS[index], color=HUES[index], markersize=4, label=label, alpha=0.75)
    spread = [own.average - own.low, own.high - own.average]
    label = "average of the tasks, 95% interval"
    axes.errorbar(own.average, own.index, xerr=spread, fmt="|", color=INK, capsize=2, elinewidth=0.9, label=label)
    shares = own.share_of_full.map(lambda share: "" if pd.isna(share) else f", {share:.0%}")
    axes.set_yticks(own.index, own.policy + shares, fontsize=7)
    axes.set_ylim(len(own) - 0.4, -0.6)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("score; beside a policy: bytes held, of the full cache's in bfloat16")
    told = f"{title}, budget 512, question known, n = {own.n.min()} per task"
    figure.suptitle(told, fontsize=9, x=0.01, ha="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def control(table: pd.DataFrame, title: str) -> Figure:
    """Mean scores with intervals: a panel for each budget, a group for each allocation, a marker for each score."""
    whole = table[table["mean"].notna()]
    budgets = sorted(whole.budget.dropna().unique())
    size = 1.2 + 3.4 * len(budgets) if len(budgets) > 1 else 6.4
    figure, grid = plt.subplots(1, len(budgets), figsize=(size, 3.5), sharey=True, squeeze=False, layout="constrained")
    scores = [name for name in whole["score of"].unique() if (whole["score of"] == name).sum() > 2]
    for axes, budget in zip(grid[0], budgets, strict=True):
        own = whole[whole.budget == budget]
        for number, score in enumerate(scores):
            some = own[(own["score of"] == score) & own.allocation.isin(ALLOCATIONS)]
            x = [ALLOCATIONS.index(name) + 0.14 * (number - (len(scores) - 1) / 2) for name in some.allocation]
            look = {"fmt": MARKERS[number], "color": HUES[number], "label": score}
            interval(axes, x, some["mean"], (some.mean_low, some.mean_high), **look)
        for policy, style in (("full", (0, (6, 2))), ("random", ":")):
            known = whole[(whole["score of"] == policy) & (whole.budget.isna() | (whole.budget == budget))]
            if len(known):
                axes.axhline(known["mean"].iloc[-1], color=FAINT, linestyle=style, linewidth=1, label=policy)
        axes.set_xticks(range(len(ALLOCATIONS)), ALLOCATIONS)
        axes.set_title(f"budget {budget:.0f}, n = {own.n.min():.0f} per task", loc="left")
        axes.set_xlabel("allocation of the budget to layers and heads")
    grid[0][0].set_ylim(-0.02, 1)
    grid[0][0].set_ylabel("mean score of three tasks of RULER")
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def by_policy(table: pd.DataFrame, title: str) -> Figure:
    """A row for each policy, a marker with an interval for each budget."""
    budgets = sorted(table.budget.dropna().unique())
    own = table[table.budget.notna()]
    order = own.groupby("policy").score.mean().sort_values(ascending=False).index
    figure, axes = plt.subplots(figsize=(7, (0.2 + 0.08 * len(budgets)) * len(order) + 1.4), layout="constrained")
    for index, budget in enumerate(budgets):
        some = own[own.budget == budget].set_index("policy")
        y = [order.get_loc(policy) + 0.2 * (index - (len(budgets) - 1) / 2) for policy in some.index]
        spread = [some.score - some.low, some.high - some.score]
        look = {"fmt": MARKERS[index], "color": HUES[index], "markersize": 4, "capsize": 2, "elinewidth": 0.8}
        axes.errorbar(some.score, y, xerr=spread, label=f"budget {budget:.0f}", **look)
    full = table[table.policy == "full"]
    axes.axvline(full.score.iloc[0], color=FAINT, linestyle=(0, (6, 2)), linewidth=1, label="full")
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlim(-0.02, 1.02)
    fewest = f"n = {own.n.min():.0f}" + (f" to {own.n.max():.0f}" if own.n.min() < own.n.max() else "")
    axes.set_xlabel(f"score on {table.task.iloc[0]} with its 95% interval, {fewest}")
    axes.set_title(title, loc="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def curves(table: pd.DataFrame, title: str) -> Figure:
    """Score against budget, a line for each policy; points of equal budgets stand beside each other."""
    policies = [policy for policy in NEEDLES if policy in {*table.policy}]
    looks = looks_of(policies)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for index, policy in enumerate(policies):
        some = table[table.policy == policy].sort_values("budget")
        if policy == "full":
            axes.axhline(some.score.iloc[0], color=INK, linestyle=(0, (6, 2)), linewidth=1, label="full")
            continue
        x = some.budget * 2 ** (0.05 * (index - len(policies) / 2))
        interval(axes, x, some.score, (some.low, some.high), label=policy, markersize=4, **looks[policy].plot)
    budgets = sorted(table[table.policy.isin(policies)].budget.dropna().unique())
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:.0f}" for budget in budgets])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(-0.03, 1.03)
    x_label = "budget in tokens per KV head and layer (points beside each other have the same budget)"
    return labelled(figure, axes, x_label, "share of the numbers found", f"{title}, n = {table.n.max():.0f}")


def differences(table: pd.DataFrame, title: str) -> Figure:
    """Differences to the base policy over all budgets, with their intervals."""
    own = table[(table.budget == "all") & (table.task == "all")].reset_index(drop=True)
    figure, axes = plt.subplots(figsize=(7, 0.24 * len(own) + 1.2), layout="constrained")
    spread = np.clip([own.difference - own.low, own.high - own.difference], 0, None)
    axes.errorbar(own.difference, own.index, xerr=spread, fmt="o", color=HUES[0], markersize=4, capsize=2, linewidth=1)
    axes.axvline(0, color=FAINT, linewidth=0.8)
    axes.set_yticks(own.index, own.policy + " - " + own.base, fontsize=8)
    axes.set_ylim(len(own) - 0.4, -0.6)
    axes.set_xlabel("difference in score, mean over the budgets, 95% interval (not corrected)")
    axes.set_title(f"{title}: variants less their bases", loc="left")
    return figure


def held(scores: pd.DataFrame, texts: pd.DataFrame, title: str) -> Figure:
    """Needles found, and nats lost on a book, against the bytes of the cache."""
    known = {*scores.policy} & {*STORES, *EVICTED} | {*texts.policy} & {*STORES, *EVICTED}
    policies = [policy for policy in (*STORES, *EVICTED) if policy in known]
    figure, grid = plt.subplots(1, 2, figsize=(7.4, 3.6), layout="constrained")
    for axes, table, measure in ((grid[0], scores, "score"), (grid[1], texts, "vs_full")):
        for index, policy in enumerate(policies):
            own = table[table.policy == policy].sort_values("cache_mib")
            own = own.drop_duplicates("budget")
            value = own[measure].fillna(0.0) if policy == "full" else own[measure]
            ends = ("low", "high") if measure == "score" else ("vs_full_low", "vs_full_high")
            look = {"fmt": MARKERS[index], "color": HUES[index % len(HUES)], "markersize": 5, "label": policy}
            look |= {"markerfacecolor": "white"} if policy in EVICTED else {}
            interval(axes, own.cache_mib, value, (own[ends[0]], own[ends[1]]), **look)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("cache held, MiB")
    grid[0].set_ylim(-0.03, 1.03)
    grid[0].set_ylabel("share of the numbers found")
    grid[0].set_title("needles", loc="left")
    grid[1].axhline(0, color=FAINT, linewidth=0.8)
    grid[1].set_ylabel("nats per token more than full")
    grid[1].set_title(f"Moby Dick, n = {texts.n.max()}", loc="left")
    figure.suptitle(f"{title}: stores (filled), evictions at several budgets (hollow)", fontsize=9, x=0.01, ha="left")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def behind_evictions(table: pd.DataFrame) -> Figure:
    """NLL of answers against bytes, for stores behind SnapKV and CAKE: 4 bits filled, 2 bits hollow."""
    figure, grid = plt.subplots(1, 2, figsize=(7.4, 3.8), sharey=True, layout="constrained")
    kinds = ["16 bits", "kivi_g32_r32", "ott_g32_r32", "kcvc_g32_r32", "gear_g32", "zipcache"]
    for axes, base in zip(grid, ("snapkv", "cake"), strict=True):
        for index, kind in enumerate(kinds):
            for end in ("_int4", "") if index else ("",):
                own = table[(table.policy == (f"{base}_{kind}{end}" if index else base)) & (table.share < 1)]
                own = own.sort_values("prompt_kib")
                x = own.prompt_kib + 0.7 * (index - len(kinds) / 2)
                look = {"color": HUES[index], "marker": MARKERS[index], "markersize": 5, "linewidth": 1}
                look |= {"label": f"{kind}{end}", "markerfacecolor": HUES[index] if end or not index else "white"}
                look["linestyle"] = "-" if end or not index else ":"
                interval(axes, x, own.nll_vs_full, (own.nll_vs_full_low, own.nll_vs_full_high), **look)
        axes.set_title(f"behind {base}", loc="left")
        axes.set_xlabel("KiB held after the prompt")
    grid[0].set_ylabel("nats per token of the answer more than full")
    handles, labels = grid[0].get_legend_handles_labels()
    title = f"Pocket model, quantized stores behind an eviction, n = {table[table.share < 1].n.max()}"
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def likelihoods(table: pd.DataFrame, title: str) -> Figure:
    """Nats per token more than the full cache against bytes. `random`, which loses many times as much, is left out."""
    policies = [name for name in table.policy.unique() if name not in ("full", "random")]
    looks = looks_of(policies)
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for policy in policies:
        own = table[table.policy == policy].sort_values("cache_mib")
        look = {"label": policy, "markersize": 4, **looks[policy].plot}
        interval(axes, own.cache_mib, own.vs_full, (own.vs_full_low, own.vs_full_high), **look)
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    told = f"{title}, n = {table.n.max()}; random is left out"
    return labelled(figure, axes, "cache held, MiB", "nats per token more than full", told)


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
