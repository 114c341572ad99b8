"""What policies and stores cost beside transformers' sdpa attention and DynamicCache, and beside the full cache.

All times come from one run, in turns, so that only their ratios are meant; they are taken round by round, where the
machine was equally busy. The model is random: time does not depend on the weights. A prefill beside that of `full` says
what evicting at its end takes; a step beside one of `snapkv`, which only grows, what evicting takes while decoding. A
store turns tokens into codes in some steps only: the mean step beside the median one says what that adds.

    python scripts/bench_overhead.py [--policies h2o,tova,kivi] [--prompt 4096] [--tokens 64] [--budget 256]
"""

import argparse
import csv
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvbench.tools.bench import rivals
from kvbench.tools.bench.clock import paired_ratio
from kvbench.tools.bench.generation import Run
from kvbench.tools.bench.providers import Provider, ours, random_ids

SMALL = Path(__file__).parent / "small_llama"  # a configuration without weights; `python -m kvbench.bench` takes it too
USUAL = "streamingllm,snapkv,tova,h2o,caote_snapkv"
COLUMNS = ("", "prefill s", "x sdpa", "x full", "decode ms", "x sdpa", "x full", "x snapkv", "mean / median")


def model_of(device: str) -> PreTrainedModel:
    """A random Llama of 12.6 M parameters with grouped-query attention."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig.from_pretrained(SMALL)).eval().to(device)


Times = dict[str, list[tuple[float, float, float]]]
"""Milliseconds of a prefill, of the median step and of the mean one, by provider and round."""


def measure(model: PreTrainedModel, providers: Sequence[Provider], args: argparse.Namespace) -> Times:
    """Every provider in turns; the first round warms up and is dropped."""
    ids, times = random_ids(model, 1, args.prompt), Times()
    for _ in track(range(args.repeats + 1), "rounds"):
        for provider in providers:
            run = Run(model, provider, ids, args.tokens)
            prefill, steps = run.prefill(), run.decode(args.tokens)
            run.forget()
            times.setdefault(provider.name, []).append((prefill, statistics.median(steps), statistics.mean(steps)))
    return {name: rounds[1:] for name, rounds in times.items()}


def row(name: str, times: Times) -> list[str]:
    """A line of the table."""
    others = {one: list(zip(*rounds, strict=True)) for one, rounds in times.items()}
    prefill, step, mean = others[name]
    ratios = [
        [paired_ratio(mine, others[other][place]).p50 for other in beside]
        for mine, place, beside in ((prefill, 0, ("transformers_sdpa", "full")), (step, 1, tuple(others)[:3]))
    ]
    figures = [statistics.median(prefill) / 1e3, *ratios[0], statistics.median(step), *ratios[1]]
    return [name, *(f"{figure:.2f}" for figure in figures), f"{paired_ratio(mean, step).p50:.3f}"]


def help_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvbench", "--help"], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompt", 4096), ("tokens", 64), ("repeats", 5), ("budget", 256), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--policies", default=USUAL, help="policies and stores, beside sdpa, full and snapkv")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    providers = [rivals.provider("transformers_sdpa", None, args.prompt), ours("full", None)]
    slugs = dict.fromkeys(["snapkv", *args.policies.split(",")])
    providers += [ours(slug, args.budget, schedule="prompt") for slug in slugs]
    times = measure(model_of(args.device), providers, args)
    where = f"{args.device}, {args.threads} threads, torch {torch.__version__}"
    title = f"prompt {args.prompt}, budget {args.budget}, {args.tokens} new tokens, {where}"
    table, rows = Table(*COLUMNS, title=title), [row(name, times) for name in times]
    for line in rows:
        table.add_row(*line)
    console = Console()
    console.print(table)
    console.print(f"python -m kvbench --help: {help_seconds():.1f} s")
    if args.csv:
        stamp = [platform.processor(), torch.__version__, transformers.__version__, args.prompt, args.tokens]
        with args.csv.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([*line, *stamp] for line in rows)


if __name__ == "__main__":
    main()
