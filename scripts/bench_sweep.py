"""What a sweep costs as rows that share their prompt and their steps, beside the same runs one by one.

All times come from one run, interleaved, so that only their ratios are meant. The model is random: time does not
depend on the weights.

    python scripts/bench_sweep.py [--prompt 4096] [--tokens 64] [--threads 2] [--device cpu] [--picture rows.svg]
"""

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from bench_overhead import model_of
from transformers import PreTrainedModel

from kvbench import make_policy
from kvbench.inference.generate import greedy, now
from kvbench.inference.row import Request
from kvbench.inference.rows import Rows
from kvbench.policies.policy import Policy
from kvbench.terminal.bars import progress

POLICIES = ("streamingllm", "snapkv", "tova", "h2o", "caote_snapkv", "cake")
BUDGETS = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Figures:
    """Seconds of a number of runs one by one and as rows, and the most bytes their caches held."""

    variants: int
    alone_prefill: float
    alone_decode: float
    rows_prefill: float
    rows_decode: float
    held_alone: int
    held_rows: int
    full_cache: int

    @property
    def ratio(self) -> float:
        """Rows over runs one by one."""
        return (self.rows_prefill + self.rows_decode) / (self.alone_prefill + self.alone_decode)


def alone(
    model: PreTrainedModel, request: Request, policies: Sequence[Policy]
) -> tuple[float, float, int, list[list[int]]]:
    """Seconds of all prefills and of all decoding, bytes held at the end, and the tokens of every run."""
    prefill, decode, held, tokens = 0.0, 0.0, 0, []
    for policy in progress(policies, "one by one", len(policies)):
        done = greedy(model, request.input_ids, policy, max_new_tokens=request.max_new_tokens)
        prefill, decode = prefill + done.prefill_seconds, decode + done.decode_seconds
        held += done.cache.nbytes
        tokens.append(done.tokens[0])
        del done
    return prefill, decode, held, tokens


def together(
    model: PreTrainedModel, request: Request, policies: Sequence[Policy]
) -> tuple[float, float, int, list[list[int]]]:
    """The same as rows."""
    rows = Rows(model)
    began = now(model)
    admitted = rows.admit(request, policies)
    prefilled = now(model)
    held = rows.nbytes
    while rows.in_flight:
        rows.step()
    for row in admitted:
        if row.error is not None:
            raise row.error
    return prefilled - began, now(model) - prefilled, held, [row.tokens for row in admitted]


def measure(model: PreTrainedModel, policies: Sequence[Policy], prompt: int, tokens: int) -> tuple[Figures, float]:
    """Both ways, and the share of outputs that are equal."""
    ids = torch.randint(0, model.config.vocab_size, (1, prompt), device=model.device)
    request = Request(ids, max_new_tokens=tokens)
    shared = together(model, request, policies)
    gc.collect()
    lone = alone(model, request, policies)
    same = sum(a == b for a, b in zip(shared[3], lone[3], strict=True)) / len(policies)
    full = greedy(model, ids, make_policy("full"), max_new_tokens=2).cache.nbytes
    return Figures(len(policies), *lone[:2], *shared[:2], lone[2], shared[2], full), same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = model_of(args.device)
    model.set_attn_implementation("kvbench")
    budgets = [int(b) for b in args.budgets.split(",")]
    policies = [make_policy(slug, b, schedule="prompt") for slug in args.policies.split(",") for b in budgets]
    together(model, Request(torch.randint(0, 8192, (1, 256)), 4), policies)  # warms up
    figures, same = measure(model, policies, args.prompt, args.tokens)
    print(json.dumps(asdict(figures), indent=1), figures.ratio, same)


if __name__ == "__main__":
    main()
