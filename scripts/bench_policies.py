"""What eviction costs: after a long prompt against its prefill, and in decoding against a policy that only grows.

Eviction of the prompt = the whole prefill with the policy less the prefill with `full`, so that scoring, allocation,
selection and compaction are all inside. All times come from one run, interleaved; only their ratios are meant.

    python scripts/bench_policies.py [--prompt 4096] [--tokens 48] [--repeats 5] [--budget 256] [--policies a,b]
"""

import argparse
import statistics

import torch
from bench_overhead import model_of, run
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvbench import KVCache, make_policy
from kvbench.attention import prepare

WINDOWED = ("snapkv", "tova", "pyramidkv", "ada_snapkv", "cake", "p2a_snapkv", "kvec", "caote_snapkv", "caote_tova")
SUMMED = ("h2o", "roco", "d2o", "p2a_h2o", "caote_h2o")
REFERENCE = "snapkv"  # grows while decoding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompt", 4096), ("tokens", 48), ("repeats", 5), ("budget", 256), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--policies", default=",".join((*WINDOWED, *SUMMED)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = prepare(model_of(args.device))
    ids = torch.randint(0, 8192, (1, args.prompt), device=args.device)
    slugs = list(dict.fromkeys(["full", REFERENCE, *args.policies.split(",")]))
    policies = {slug: make_policy(slug, args.budget, schedule="prompt") for slug in slugs}
    times: dict[str, list[tuple[float, float]]] = {slug: [] for slug in slugs}
    for _ in track(range(args.repeats + 1), "rounds"):
        for slug, policy in policies.items():
            cache = KVCache(model.config, policy, prompt_length=args.prompt)
            times[slug].append(run(model, cache, ids, args.tokens))
    where = f"{args.device}, {args.threads} threads, torch {torch.__version__}"
    table = Table(
        "policy",
        "eviction / prefill",
        f"decode / {REFERENCE}",
        title=f"prompt {args.prompt}, budget {args.budget}, {args.tokens} new tokens, {where}",
    )
    for slug in slugs:
        rounds = list(zip(times[slug], times["full"], times[REFERENCE], strict=True))[1:]  # the first one warms up
        eviction = statistics.median((mine[0] - full[0]) / full[0] for mine, full, _ in rounds)
        decode = statistics.median(mine[1] / grows[1] for mine, _, grows in rounds)
        table.add_row(slug, f"{max(0.0, eviction):.0%}", f"{decode:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
