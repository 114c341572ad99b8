"""What policies and stores cost beside transformers' sdpa attention and DynamicCache, and beside the full cache.

All times come from one run, in turns, so that only their ratios are meant; they are taken round by round, where the
machine was equally busy. The model is random: time does not depend on the weights. A prefill beside that of `full` says
what evicting at its end takes; a step beside one of `snapkv`, which only grows, what evicting takes while decoding. A
store turns tokens into codes in some steps only: the mean step beside the median one says what that adds.

    python scripts/bench_overhead.py [--policies h2o,tova,kivi] [--prompt 4096] [--tokens 64] [--budget 256]
"""

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
import transformers
from tqdm import trange
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvbench.tools.bench import rivals
from kvbench.tools.bench.clock import paired_ratio
from kvbench.tools.bench.generation import Run
from kvbench.tools.bench.providers import Provider, ours, random_ids

SMALL = Path(__file__).parent / "small_llama"  # a configuration without weights; `python -m kvbench.bench` takes it too
USUAL = "streamingllm,snapkv,tova,h2o,caote_snapkv"


def model_of(device: str) -> PreTrainedModel:
    """A random Llama of 12.6 M parameters with grouped-query attention."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig.from_pretrained(SMALL)).eval().to(device)


Times = dict[str, list[tuple[float, float, float]]]
"""Milliseconds of a prefill, of the median step and of the mean one, by provider and round."""


def measure(model: PreTrainedModel, providers: Sequence[Provider], args: argparse.Namespace) -> Times:
    """Every provider in turns; the first round warms up and is dropped."""
    ids, times = random_ids(model, 1, args.prompt), Times()
    for _ in trange(args.repeats + 1, desc="rounds"):
        for provider in providers:
            run = Run(model, provider, ids, args.tokens)
            prefill, steps = run.prefill(), run.decode(args.tokens)
            run.forget()
            name = provider.name.removeprefix("transformers_")
            times.setdefault(name, []).append((prefill, statistics.median(steps), statistics.mean(steps)))
    return {name: rounds[1:] for name, rounds in times.items()}


def table(times: Times) -> pd.DataFrame:
    """A line for each provider; ratios are medians over rounds."""
    prefill, step, mean = ({name: [one[i] for one in rounds] for name, rounds in times.items()} for i in range(3))
    rows = {}
    for name in times:
        rows[name] = {"prefill s": statistics.median(prefill[name]) / 1e3}
        rows[name] |= {f"prefill x {o}": paired_ratio(prefill[name], prefill[o]).p50 for o in ("sdpa", "full")}
        rows[name]["decode ms"] = statistics.median(step[name])
        rows[name] |= {f"decode x {o}": paired_ratio(step[name], step[o]).p50 for o in ("sdpa", "full", "snapkv")}
        rows[name]["mean / median"] = paired_ratio(mean[name], step[name]).p50
    return pd.DataFrame.from_dict(rows, orient="index")


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
    found = table(measure(model_of(args.device), providers, args))
    where = f"{args.device}, {args.threads} threads, torch {torch.__version__}"
    print(f"prompt {args.prompt}, budget {args.budget}, {args.tokens} new tokens, {where}")
    print(found.round(3).to_string())
    print(f"python -m kvbench --help: {help_seconds():.1f} s")
    if args.csv:
        stamp = {
            "processor": platform.processor(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        stamp |= {"prompt": args.prompt, "new_tokens": args.tokens}
        found.round(3).assign(**stamp).to_csv(args.csv, mode="a", header=False)


if __name__ == "__main__":
    main()
