"""results/pocket/stores.csv, its tables (printed) and its picture: what quantised stores cost on the pocket model.

Every store alone at 2 and 4 bits, then behind SnapKV and CAKE at equal bytes: budgets are found by bisection so that
the bytes held after the prompt come up to a share of the 16-bit keys and values. Scores come from runs as
`python -m kvbench` makes them; neither finished ones nor rows that the CSV has are computed again. NLL is that of the
reference answer, per token, read through the store's cache: finer than right or wrong.

    python scripts/pocket_stores.py [--limit 200] [--runs results/runs/pocket_stores] [-o results/pocket/stores.csv]
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from kvbench.analysis.load import read_result
from kvbench.analysis.result import Result
from kvbench.analysis.statistics import Difference, paired_difference
from kvbench.engine.prompts import make_prompts
from kvbench.engine.run import run_cells
from kvbench.identity.cell import Cell
from kvbench.inference.generate import generate_tokens
from kvbench.inference.teacher_forcing import continuation_scores
from kvbench.models.loading import LoadedModel, load
from kvbench.models.prompts import Prompt
from kvbench.report.figures.style import house_style, save
from kvbench.tools.diagnose import cells_of

SINGLE, MULTI = "ruler/niah_single_1", "ruler/niah_multikey_2"
STORES = ("kivi", "kivi_g32_r128", "ott", "ott_g32_r128", "kcvc", "gear", "zipcache")
ALONE = ("full", *STORES, *(f"{store}_int4" for store in STORES), "ott_g32_r128_skipnone")
SMALL = ("kivi_g32_r32", "ott_g32_r32", "kcvc_g32_r32", "gear_g32", "zipcache")  # survivors are few: small groups
GROUP = 32
SHARES = (0.125, 0.0625)  # of the 16-bit keys and values of the prompt, as in CAKE's appendix E
EVICTIONS = ("snapkv", "cake")
SIZED_ON = 3  # prompts
SIDES = ("", "_low", "_high")  # of a column with an interval


class Bench:
    """The pocket model, the prompts of the hard task, and what the full cache makes of them."""

    def __init__(self, limit: int, runs: Path) -> None:
        self.limit = limit
        self._fields = [f"limit={limit}", f"out={runs}", "dtype=bfloat16", "task.length=1024"]
        cell = self.cell("full", None, MULTI)
        self.model: LoadedModel = load(cell.checkpoint, cell.device)
        self.prompts: list[Prompt] = make_prompts(cell)
        self._full = self.scores("full", None, MULTI)
        self._full_nll = self.nll(cell)

    def cell(self, policy: str, budget: int | None, task: str) -> Cell:
        fields = [*self._fields, f"task={task}", f"policy={policy}"]
        return cells_of(fields if budget is None else [*fields, f"budget={budget}"])[0]

    def scores(self, policy: str, budget: int | None, task: str) -> Result:
        """The harness's own run."""
        return read_result(run_cells([self.cell(policy, budget, task)])[0].folder, self.limit)

    def nll(self, cell: Cell) -> list[float]:
        """-log p of each prompt's reference answer, mean over its tokens, in nats."""
        encode = cell.checkpoint.tokenizer().encode
        values = []
        for prompt in self.prompts:
            answer = encode(f" {prompt.example.references[0]}", add_special_tokens=False, return_tensors="pt")
            scored = continuation_scores(self.model.model, prompt.ids[None].long(), answer, cell.policy)
            values.append(-float(scored.logprobs.mean()))
        return values

    def prompt_bytes(self, cell: Cell) -> float:
        """Bytes held once the prompt is in, mean over the first prompts."""
        ids = [prompt.ids[None].long() for prompt in self.prompts[:SIZED_ON]]
        return sum(
            generate_tokens(self.model.model, x, cell.policy, max_new_tokens=1).cache.held_nbytes for x in ids
        ) / len(ids)

    def budget(self, policy: str, share: float) -> int:
        """A budget whose bytes after the prompt come up to a share of those of a 16-bit cache, and not above it."""
        config, prompts = self.model.model.config, self.prompts[:SIZED_ON]
        per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        most = share * per_token * sum(prompt.length for prompt in prompts) / len(prompts)

        def fits(budget: int) -> bool:
            return self.prompt_bytes(self.cell(policy, budget, MULTI)) <= most

        low = _last(fits, 32, min(prompt.length for prompt in prompts))  # no smaller than an observation window
        while fits(whole := (low // GROUP + 1) * GROUP):  # bytes fall where one more group of keys is whole
            low = whole
        return _last(fits, low, whole)

    def row(self, policy: str, budget: int | None = None, share: float = 1.0) -> dict[str, Any]:
        """One policy at a share of the bytes of a 16-bit cache (1: no eviction): KiB, scores, NLL, with intervals.

        vs_full, nll_vs_full: mean difference to the full cache on the same prompts, by the paired bootstrap.
        """
        cell, multi = self.cell(policy, budget, MULTI), self.scores(policy, budget, MULTI)
        single, nll = None if budget else self.scores(policy, budget, SINGLE), self.nll(cell)
        pairs = ([s.score for s in record.samples] for record in (self._full, multi))
        return {
            "share": share,
            "policy": policy,
            "budget": budget,
            "n": len(self.prompts),
            "prompt_kib": self.prompt_bytes(cell) / 2**10,
            "end_kib": multi.cache_bytes / 2**10,
            **{f"single{side}": single and getattr(single, f"score{side}") for side in SIDES},
            **{f"multi{side}": getattr(multi, f"score{side}") for side in SIDES},
            **_sides("vs_full", paired_difference(*pairs)),
            "nll": sum(nll) / len(nll),
            **_sides("nll_vs_full", paired_difference(self._full_nll, nll)),
        }


def _sides(name: str, of: Difference) -> dict[str, float]:
    return {name: of.mean, f"{name}_low": of.low, f"{name}_high": of.high}


def _last(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The last number that fits between one that does and one that does not, if there is one change in between."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plan() -> list[tuple[float, str]]:
    """Share and policy of every row, the stores alone first."""
    behind = ("", *(f"_{store}_int4" for store in SMALL), *(f"_{store}" for store in SMALL))
    return [(1.0, policy) for policy in ALONE] + [
        (share, f"{eviction}{store}") for share, eviction, store in product(SHARES, EVICTIONS, behind)
    ]


def measure(limit: int, runs: Path, done: Collection[tuple[float, str]]) -> Iterator[dict[str, Any]]:
    """The rows that are not done; half as many examples behind an eviction."""
    left = [row for row in plan() if row not in done]
    for alone in (True, False):
        policies = [(share, policy) for share, policy in left if (share == 1) == alone]
        bench = Bench(limit if alone else limit // 2, runs) if policies else None
        for share, policy in policies:
            assert bench is not None
            yield bench.row(policy) if alone else bench.row(policy, bench.budget(policy, share), share)


def markdown(table: pd.DataFrame) -> str:
    """The tables: stores alone, then each share."""
    texts = []
    for share, rows in table.groupby("share", sort=False):
        alone = share == 1
        shown = {
            "policy": rows["policy"],
            **({} if alone else {"tokens": rows["budget"].map("{:.0f}".format)}),
            "KiB": rows["prompt_kib"].map("{:.0f}".format),
            **({"single": _with_interval(rows, "single")} if alone else {}),
            "multi-key": _with_interval(rows, "multi"),
            "less than full": _difference(-rows["vs_full"], -rows["vs_full_high"], -rows["vs_full_low"]),
            "answer NLL above full": _difference(*(rows[f"nll_vs_full{side}"] for side in SIDES)),
        }
        lines = ["|---" * len(shown) + "|"]
        lines += (f"| {' | '.join(cells)} |" for cells in zip(*shown.values(), strict=True))
        title = "alone" if alone else f"{share:.2%} of the 16-bit keys and values"
        texts.append("\n".join([f"{title}\n", f"| {' | '.join(shown)} |", *lines, ""]))
    return "\n".join(texts)


def _with_interval(rows: pd.DataFrame, name: str) -> list[str]:
    values = (rows[f"{name}{side}"] for side in SIDES)
    return [f"{mean:.2f} ({low:.2f}-{high:.2f})" for mean, low, high in zip(*values, strict=True)]


def _difference(*sides: pd.Series) -> list[str]:
    """Means, with their lower and upper sides; marked where the interval leaves out 0."""
    found = []
    for mean, low, high in zip(*sides, strict=True):
        shown = "{:+.2f} ({:+.2f}..{:+.2f})".format(*(round(x, 2) + 0.0 for x in (mean, low, high)))
        found.append(shown + "*" * (low > 0 or high < 0))
    return found


def draw(table: pd.DataFrame, path: Path) -> None:
    """Answer NLL above the full cache's, against the bytes held."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    for axes, eviction in zip(
        figure.subplots(1, len(EVICTIONS), sharey=True, squeeze=False)[0], EVICTIONS, strict=True
    ):
        rows = table[table["policy"].str.startswith(f"{eviction}") & (table["share"] < 1)]
        for held, own in rows.groupby(rows["policy"].str.removeprefix(eviction).str.lstrip("_"), sort=False):
            store = str(held).removesuffix("_int4")
            color = "black" if store == "" else f"C{SMALL.index(store)}"
            line = "--" if store != held else ":" if store else "-"
            axes.plot(own["prompt_kib"], own["nll_vs_full"], line, marker="o", color=color, label=held or "16 bits")
        axes.set(xlabel="KiB held after the prompt", title=eviction)
    figure.axes[0].set_ylabel("answer NLL above full, nats per token")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--runs", type=Path, default=Path("results/runs/pocket_stores"))
    parser.add_argument("-o", "--out", type=Path, default=Path("results/pocket/stores.csv"))
    parser.add_argument("--redraw", action="store_true", help="measure nothing: tables and picture of the CSV there is")
    args = parser.parse_args()
    if not args.redraw:
        torch.set_num_threads(1)  # the model is small: more threads wait for each other
        rows = pd.read_csv(args.out).to_dict("records") if args.out.exists() else []
        for row in measure(args.limit, args.runs, {(done["share"], done["policy"]) for done in rows}):
            sys.stderr.write(f"{row['share']:g} {row['policy']}: {row['multi']:.3f}, NLL {row['nll']:.3f}\n")
            rows.append(row)
            rows.sort(key=lambda done: plan().index((done["share"], done["policy"])))
            pd.DataFrame(rows).round(4).to_csv(args.out, index=False)
    table = pd.read_csv(args.out)
    sys.stdout.write(markdown(table))
    with house_style():
        draw(table, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
