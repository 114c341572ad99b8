"""Tables (printed) of results/pocket/ from a CSV of it, which `python -m kvbench.results collect` wrote.

Ablations of a method get a table of their own.

    python scripts/pocket_results.py results/pocket/ruler_1024.csv
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

EASY, HARD = "ruler_niah_single_1", "ruler_niah_multikey_2"
ABLATED = ("cake", "d2o", "kvec")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    table = read(parser.parse_args().csv)
    changed = ablations(table)
    sys.stdout.write(markdown(table[~changed]))
    if changed.any():
        sys.stdout.write("\n" + markdown(table[changed | table["name"].isin(ABLATED)]))


if __name__ == "__main__":
    main()
