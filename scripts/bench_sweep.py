"""What a sweep costs as rows that share their prompt and their steps, beside the same runs one by one.

All times come from one run, interleaved, so that only their ratios are meant. The model is random: time does not
depend on the weights.

    python scripts/bench_sweep.py variants     # 36 variants of one prompt, and 36 runs
    python scripts/bench_sweep.py rows -o rows.svg   # seconds of a step against the rows in it
    Both: [--prompt 4096] [--tokens 64] [--threads 2] [--device cpu]
"""

import argparse
import gc
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from bench_overhead import model_of
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from kvbench import make_policy
from kvbench.inference.generate import greedy, now
from kvbench.inference.row import Request
from kvbench.inference.rows import Rows
from kvbench.policies.policy import Policy
from kvbench.terminal.bars import progress

POLICIES = ("streamingllm", "snapkv", "tova", "h2o", "caote_snapkv", "cake")
BUDGETS = (64, 128, 256, 512, 1024, 2048)
IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass
class Cost:
    """Seconds of prefilling and of decoding, bytes held once the prompts are in, and the new tokens of every run."""

    prefill: float
    decode: float
    held: int
    tokens: list[list[int]]


def alone(model: PreTrainedModel, request: Request, policies: Sequence[Policy]) -> Cost:
    """One run after the other."""
    cost = Cost(0.0, 0.0, 0, [])
    for policy in progress(policies, "one by one", len(policies)):
        done = greedy(model, request.input_ids, policy, max_new_tokens=request.max_new_tokens)
        cost.prefill += done.prefill_seconds
        cost.decode += done.decode_seconds
        cost.held += done.cache.nbytes
        cost.tokens.append(done.tokens[0])
    return cost


def together(model: PreTrainedModel, request: Request, policies: Sequence[Policy]) -> Cost:
    """All as rows."""
    rows, began = Rows(model), now(model)
    admitted = rows.admit(request, policies)
    prefilled, held = now(model), rows.nbytes
    while rows.in_flight:
        rows.step()
    for row in admitted:
        if row.error is not None:
            raise row.error
    return Cost(prefilled - began, now(model) - prefilled, held, [row.tokens for row in admitted])


def variants(model: PreTrainedModel, args: argparse.Namespace) -> dict[str, object]:
    """Six policies at six budgets after one prompt, both ways."""
    policies = [make_policy(slug, budget, schedule="prompt") for slug in POLICIES for budget in BUDGETS]
    ids = torch.randint(0, model.config.vocab_size, (1, args.prompt), device=model.device)
    together(model, Request(ids[:, :256], 4), policies)  # warms up
    shared = together(model, Request(ids, args.tokens), policies)
    gc.collect()
    lone = alone(model, Request(ids, args.tokens), policies)
    full = greedy(model, ids, make_policy("full"), max_new_tokens=2).cache.nbytes
    same = sum(a == b for a, b in zip(shared.tokens, lone.tokens, strict=True))
    found = {
        "variants": len(policies),
        "one_by_one": {"prefill_s": lone.prefill, "decode_s": lone.decode},
        "rows": {"prefill_s": shared.prefill, "decode_s": shared.decode},
        "ratio": (shared.prefill + shared.decode) / (lone.prefill + lone.decode),
        "equal_answers": same,
        "rows_held_bytes": shared.held,
        "one_by_one_held_bytes": lone.held,
        "full_cache_bytes": full,
    }
    table = Table(title=f"{len(policies)} variants, {args.prompt} prompt tokens, {args.tokens} new")
    for name in ("", "prefill s", "decode s", "sum"):
        table.add_column(name, justify="right")
    for name, cost in (("one by one", lone), ("as rows", shared)):
        table.add_row(name, f"{cost.prefill:.1f}", f"{cost.decode:.1f}", f"{cost.prefill + cost.decode:.1f}")
    Console().print(table)
    Console().print(f"rows take {found['ratio']:.3f} of the time; {same} of {len(policies)} answers are equal")
    return found


def rows(model: PreTrainedModel, args: argparse.Namespace) -> dict[str, object]:
    """Milliseconds of a step for each row: variants of one example, and examples of one variant."""
    ids = torch.randint(0, model.config.vocab_size, (1, 1024), device=model.device)
    several = [make_policy(slug, b, schedule="prompt") for b in BUDGETS[:4] for slug in POLICIES]
    found: dict[str, object] = {}
    for name, one in (("variants of one example", None), ("examples of one variant", make_policy("tova", 256))):
        found[name] = {n: _step(model, ids, several, one, n) for n in IN_FLIGHT}
    if args.output:
        _draw(found, args.output)
    for name, steps in found.items():
        Console().print(name, json.dumps(steps))
    return found


def _step(
    model: PreTrainedModel, ids: torch.Tensor, several: Sequence[Policy], one: Policy | None, count: int
) -> float:
    flight = Rows(model)
    if one is None:
        flight.admit(Request(ids, 32), [several[i % len(several)] for i in range(count)])
    for index in range(0 if one is None else count):
        flight.admit(Request(ids[:, index : 800 + index], 32), [one])
    for _ in range(4):
        flight.step()
    began = time.perf_counter()
    for _ in range(8):
        flight.step()
    return round((time.perf_counter() - began) / 8 / count * 1e3, 3)


def _draw(found: dict[str, object], path: Path) -> None:
    from matplotlib.figure import Figure

    from kvbench.report.figures.style import house_style, save

    with house_style():
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        for (name, steps), marker in zip(found.items(), "os", strict=True):
            assert isinstance(steps, dict)
            axes.plot(list(steps), list(steps.values()), marker=marker, label=name)
        axes.set(xscale="log", xlabel="rows in flight", ylabel="ms of a decoding step, per row", ylim=(0, None))
        axes.set_xticks(IN_FLIGHT, [str(n) for n in IN_FLIGHT])
        axes.legend(frameon=False)
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("variants", "rows"))
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--output", type=Path, help="the picture of `rows`")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = model_of(args.device)
    model.set_attn_implementation("kvbench")
    with torch.inference_mode():
        found = (variants if args.part == "variants" else rows)(model, args)
    where = {"machine": platform.processor() or platform.machine(), "threads": args.threads, "device": args.device}
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps({**where, **versions, **found}))


if __name__ == "__main__":
    main()
