"""What kvbench's own attention and cache cost beside transformers' sdpa attention and DynamicCache, on one device.

All times come from one run, interleaved, so that only their ratios are meant. The model is random: time does not
depend on the weights.

    python scripts/bench_overhead.py [--prompt 4096] [--tokens 64] [--repeats 5] [--device cpu] [--threads 2]
"""

import argparse
import csv
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvbench import KVCache, make_policy

SMALL = Path(__file__).parent / "small_llama"  # a configuration without weights; `python -m kvbench.bench` takes it too


def model_of(device: str) -> PreTrainedModel:
    """A random Llama of 12.6 M parameters with grouped-query attention."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig.from_pretrained(SMALL)).eval().to(device)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def run(model: PreTrainedModel, cache: object, ids: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Seconds of one prefill and milliseconds per decoded token."""
    device = model.device.type
    began = now(device)
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    prefilled = now(device)
    for _ in range(tokens):
        out = model(out.logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
    return prefilled - began, (now(device) - prefilled) / tokens * 1e3


def measure(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Interleaved repeats of every provider; the first round warms up and is dropped."""
    model = model_of(args.device)
    ids = torch.randint(0, 8192, (1, args.prompt), device=args.device)
    length = args.prompt

    def kvbench_cache(slug: str) -> Callable[[], object]:
        policy = make_policy(slug, args.budget, schedule="prompt")
        return lambda: KVCache(model.config, policy, prompt_length=length)

    providers: dict[str, tuple[str, Callable[[], object]]] = {
        "transformers sdpa, DynamicCache": ("sdpa", DynamicCache),
        "kvbench full": ("kvbench", kvbench_cache("full")),
        **{
            f"kvbench {slug}, budget {args.budget}": ("kvbench", kvbench_cache(slug))
            for slug in ("streamingllm", "snapkv", "tova", "h2o", "caote_snapkv")
        },
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in providers}
    for _ in range(args.repeats + 1):
        for name, (attention, cache) in providers.items():
            model.set_attn_implementation(attention)
            times[name].append(run(model, cache(), ids, args.tokens))
    return {name: runs[1:] for name, runs in times.items()}


def help_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvbench", "--help"], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompt", 4096), ("tokens", 64), ("repeats", 5), ("budget", 256), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    rows = []
    times = measure(args)
    base = times["transformers sdpa, DynamicCache"]
    for name, runs in times.items():
        prefill, decode = (statistics.median(r[i] for r in runs) for i in (0, 1))
        # Ratios are taken within a round, where the machine was equally busy, then the median of them.
        ratios = [statistics.median(r[i] / b[i] for r, b in zip(runs, base, strict=True)) for i in (0, 1)]
        rows.append((name, prefill, ratios[0], decode, ratios[1]))
    where = f"{args.device}, {args.threads} threads, torch {torch.__version__}"
    title = f"prompt {args.prompt}, {args.tokens} new tokens, {where}"
    table = Table("", "prefill s", "x sdpa", "decode ms/token", "x sdpa", title=title)
    for name, *numbers in rows:
        table.add_row(name, *(f"{n:.2f}" for n in numbers))
    console = Console()
    console.print(table)
    console.print(f"python -m kvbench --help: {help_seconds():.1f} s")
    if args.csv:
        with args.csv.open("a", newline="") as file:
            stamp = (platform.processor(), torch.__version__, transformers.__version__, args.prompt, args.tokens)
            csv.writer(file).writerows((*row, *stamp) for row in rows)


if __name__ == "__main__":
    main()
