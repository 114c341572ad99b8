"""What eviction costs: at the end of a long prompt beside the full cache, in decoding beside a policy that only grows.

Prefills take turns with those of `full`: what a policy takes longer is its scoring, allocation, selection and
compaction, and, where it sums up all rows of attention, those sums. Decoding takes turns with `snapkv`, a few tokens at
a time. So every ratio compares moments that lie next to each other; all times come from one run, and only their ratios
are meant.

    python scripts/bench_policies.py [--prompt 4096] [--tokens 96] [--repeats 5] [--budget 256] [--policies a,b]
"""

import argparse
import csv
import time
from pathlib import Path

import torch
from bench_overhead import model_of
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.tools.bench.clock import paired_ratio
from kvbench.tools.bench.generation import Run, prefills_in_turns, steps_in_turns
from kvbench.tools.bench.providers import ours, random_ids

WINDOWED = ("snapkv", "tova", "pyramidkv", "ada_snapkv", "cake", "p2a_snapkv", "kvec", "caote_snapkv", "caote_tova")
SUMMED = ("h2o", "roco", "d2o", "p2a_h2o", "caote_h2o")
REFERENCE = "snapkv"  # grows while decoding
ROUND = 4  # tokens decoded in a turn


def measure(model: PreTrainedModel, slug: str, ids: Tensor, args: argparse.Namespace) -> tuple[float, float]:
    """A policy's prefill beside that of `full`, and its decoding step beside the reference's: medians of ratios."""
    mine, full, grows = (
        Run(model, ours(name, budget, schedule="prompt"), ids)
        for name, budget in ((slug, args.budget), ("full", None), (REFERENCE, args.budget))
    )
    prefills = prefills_in_turns([mine, full], args.repeats)
    full.forget()
    grows.prefill()
    steps = steps_in_turns([mine, grows], args.tokens // ROUND, ROUND)
    return paired_ratio(*prefills).p50, paired_ratio(*steps).p50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompt", 4096), ("tokens", 96), ("repeats", 5), ("budget", 256), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--policies", default=",".join((*WINDOWED, *SUMMED)))
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = model_of(args.device)
    ids = random_ids(model, 1, args.prompt)
    where = f"{args.device}, {args.threads} threads, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    columns = ("policy", "prefill / full", f"decode / {REFERENCE}")
    table = Table(*columns, title=f"prompt {args.prompt}, budget {args.budget}, {args.tokens} new tokens, {where}")
    rows = []
    for slug in track(args.policies.split(","), "policies"):
        prefill, step = measure(model, slug, ids, args)
        rows.append((slug, f"{prefill:.3f}", f"{step:.3f}"))
        table.add_row(slug, f"{prefill:.2f}x", f"{step:.2f}x")
    Console().print(table)
    if args.csv is not None:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])


if __name__ == "__main__":
    main()
