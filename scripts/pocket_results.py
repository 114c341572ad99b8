"""Tables (printed) and picture of results/pocket/ from a CSV of it, which `python -m kvbench.results collect` wrote.

Ablations of a method get a table of their own, and are not drawn.

    python scripts/pocket_results.py results/pocket/ruler_1024.csv
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

EASY, HARD = "ruler_niah_single_1", "ruler_niah_multikey_2"
ABLATED = ("cake", "d2o", "kvec")
SHOWN = 0.15  # policies that never reach this score on the hard task are drawn in grey


def read(path: Path) -> pd.DataFrame:
    """The rows of a collected CSV, the policy's name apart from what its decoding does."""
    table = pd.read_csv(path)
    parts = table["policy"].str.extract(r"^(?P<name>.+?)(?: \((?P<decode>[^()]+)\))?$")
    task = table["task"].str.partition("(")[0]  # every run of a table has the same fields of its task
    return table.assign(name=parts["name"], decode=parts["decode"].fillna(""), task=task)


def ablations(table: pd.DataFrame) -> pd.Series:
    """Which rows are a method with something changed."""
    return table["name"].str.startswith(tuple(f"{method}_" for method in ABLATED))


def markdown(table: pd.DataFrame) -> str:
    """One line per policy: score (95% interval) on both tasks and KiB held, at each budget."""
    budgets = sorted(int(b) for b in table["budget"].dropna().unique())
    head = [f"single, {b} | multi-key, {b} | KiB held, {b}" for b in budgets]
    lines = [f"| policy | decoding | {' | '.join(head)} |", "|---" * (2 + 3 * len(budgets)) + "|"]
    hard = table[table["task"] == HARD].groupby("name")["score"]
    for name in (hard.max() + hard.min() / 10).sort_values(ascending=False, kind="stable").index:
        mine = table[table["name"] == name]
        cells = [name, mine["decode"].iloc[0]]
        for budget in budgets:
            at = mine[(mine["budget"] == budget) | mine["budget"].isna()].set_index("task")
            rows = [at.loc[task] for task in (EASY, HARD)]
            cells += [f"{r['score']:.2f} ({r['score_low']:.2f}-{r['score_high']:.2f})" for r in rows]
            cells.append(f"{rows[1]['cache_bytes'] / 2**10:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(table: pd.DataFrame, path: Path) -> None:
    """Score on the hard task against the bytes really held."""
    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    axes = figure.subplots()
    for name, rows in table[table["task"] == HARD].groupby("name"):
        rows = rows.sort_values("cache_bytes")
        kib = rows["cache_bytes"] / 2**10
        if name == "full":
            axes.axhline(rows["score"].iloc[0], color="grey", linewidth=1, linestyle="--")
            words = f"full cache, {kib.iloc[0]:.0f} KiB"
            place = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "color": "grey"}
            axes.text(0.01, rows["score"].iloc[0] + 0.012, words, **place)
        elif rows["score"].max() >= SHOWN:
            axes.plot(kib, rows["score"], marker="o", label=str(name))
        else:
            axes.plot(kib, rows["score"], marker="o", color="lightgrey", alpha=0.4)
    axes.set(xlabel="KiB really held per example (keys, values, positions, statistics)", ylim=(-0.02, 1))
    axes.set_ylabel("score, RULER niah_multikey_2 at 1,024 tokens")
    axes.legend(fontsize=8, loc="best")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    path = parser.parse_args().csv
    table = read(path)
    changed = ablations(table)
    sys.stdout.write(markdown(table[~changed]))
    if changed.any():
        sys.stdout.write("\n" + markdown(table[changed | table["name"].isin(ABLATED)]))
    draw(table[~changed], path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
