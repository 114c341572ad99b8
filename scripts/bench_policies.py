"""What eviction costs: at the end of a long prompt beside its prefill, in decoding beside a policy that only grows.

Eviction of the prompt is scoring, allocation, selection and compaction in all layers; it is timed inside the prefill it
belongs to and divided by the rest of that prefill. A policy that sums up all rows of attention computes its attention
from the same rows: what that takes longer than the attention of snapkv, right before, is eviction too. Decoding takes
turns with snapkv, a few tokens at a time, so that every ratio compares moments that lie next to each other. All times
come from one run; only their ratios are meant.

    python scripts/bench_policies.py [--prompt 4096] [--tokens 96] [--repeats 5] [--budget 256] [--policies a,b]
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_overhead import model_of, now
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache import layer as layer_module
from kvbench.cache.hook import prepare
from kvbench.cache.queue import EvictionQueue

WINDOWED = ("snapkv", "tova", "pyramidkv", "ada_snapkv", "cake", "p2a_snapkv", "kvec", "caote_snapkv", "caote_tova")
SUMMED = ("h2o", "roco", "d2o", "p2a_h2o", "caote_h2o")
REFERENCE = "snapkv"  # grows while decoding
ROUND = 4  # tokens decoded in a turn


@contextmanager
def timed(device: str) -> Iterator[dict[str, float]]:
    """Seconds of all layers' attention and of what their policy observes, scores, allocates, drops and moves."""
    places = {"attend": layer_module, "put": EvictionQueue, "end_call": EvictionQueue}
    methods = {name: getattr(place, name) for name, place in places.items()}
    seconds = dict.fromkeys(places, 0.0)

    def watched(name: str) -> Callable[..., Any]:
        def method(*args: Any) -> Any:  # noqa: ANN401 - whatever the method takes and gives
            began = now(device)
            out = methods[name](*args)
            seconds[name] += now(device) - began
            return out

        return method

    for name, place in places.items():
        setattr(place, name, watched(name))
    try:
        yield seconds
    finally:
        for name, place in places.items():
            setattr(place, name, methods[name])


class Run:
    """One policy on its way through a prompt and the tokens after it."""

    def __init__(self, model: PreTrainedModel, slug: str, budget: int, ids: Tensor) -> None:
        self._model = model
        self._policy = make_policy(slug, budget, schedule="prompt")
        self._ids = ids
        self.attending = 0.0
        self.shares: list[float] = []
        self.steps: list[float] = []

    @property
    def sums_rows(self) -> bool:
        """Whether its attention comes out of the rows it sums up."""
        return self._policy.scorer is not None and self._policy.scorer.sums_up is not None

    def prefill(self, plain: float | None = None) -> None:
        """Take the prompt in anew and note the share of the prefill that eviction adds to it.

        plain: seconds that attention alone takes, where more than those count as eviction.
        """
        device = self._model.device.type
        self._cache = KVCache(self._model.config, self._policy, prompt_length=self._ids.shape[1])
        with timed(device) as seconds:
            began = now(device)
            out = self._model(self._ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            whole = now(device) - began
        self._token = out.logits[:, -1:].argmax(-1)
        self.attending = seconds["attend"]
        evicting = seconds["put"] + seconds["end_call"] + (0.0 if plain is None else self.attending - plain)
        self.shares.append(evicting / (whole - evicting))

    def decode(self) -> None:
        """Decode a few tokens and note the seconds each took."""
        device = self._model.device.type
        began = now(device)
        for _ in range(ROUND):
            out = self._model(self._token, past_key_values=self._cache, use_cache=True)
            self._token = out.logits[:, -1:].argmax(-1)
        self.steps.append((now(device) - began) / ROUND)


@torch.inference_mode()
def measure(run: Run, reference: Run, repeats: int, tokens: int) -> tuple[float, float]:
    """The share of a prefill that eviction adds, and a decoding step beside the reference's: medians.

    The first round of each warms up and is dropped.
    """
    for _ in range(repeats + 1):
        if run.sums_rows:
            reference.prefill()
        run.prefill(reference.attending if run.sums_rows else None)
    reference.prefill()
    for _ in range(tokens // ROUND + 1):
        reference.decode()
        run.decode()
    ratios = [mine / grows for mine, grows in zip(run.steps[1:], reference.steps[1:], strict=True)]
    return statistics.median(run.shares[1:]), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompt", 4096), ("tokens", 96), ("repeats", 5), ("budget", 256), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--policies", default=",".join((*WINDOWED, *SUMMED)))
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = prepare(model_of(args.device))
    ids = torch.randint(0, 8192, (1, args.prompt), device=args.device)
    where = f"{args.device}, {args.threads} threads, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    columns = ("policy", "eviction / prefill", f"decode / {REFERENCE}")
    table = Table(*columns, title=f"prompt {args.prompt}, budget {args.budget}, {args.tokens} new tokens, {where}")
    rows = []
    for slug in track(args.policies.split(","), "policies"):
        run, reference = (Run(model, name, args.budget, ids) for name in (slug, REFERENCE))
        share, ratio = measure(run, reference, args.repeats, args.tokens)
        rows.append((slug, f"{share:.3f}", f"{ratio:.2f}"))
        table.add_row(slug, f"{share:.1%}", f"{ratio:.2f}")
    Console().print(table)
    if args.csv is not None:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])


if __name__ == "__main__":
    main()
