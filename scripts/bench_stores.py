"""What quantised stores cost beside the dense one: decoding through codes, and turning a group of tokens into codes.

All times come from one run, interleaved, so that only their ratios are meant. The model is random: time does not
depend on the weights. Before anything is timed, attention from codes is compared with attention over the dequantised
view.

    python scripts/bench_stores.py [--prompt 4096] [--tokens 8] [--repeats 11] [--stores kivi,ott] [--csv FILE]
"""

import argparse
import csv
import platform
import statistics
from pathlib import Path

import torch
import transformers
from bench_overhead import model_of, now
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.policies.observation import AttentionParams, Observation
from kvbench.policies.policy import Policy
from kvbench.policies.stores.ott import Ott
from kvbench.policies.stores.store import LayerStore

STORES = "kivi,kivi_g32_r128,kivi_int4,ott,ott_g32_r32,kcvc,gear,zipcache"


@torch.inference_mode()
def prefilled(model: PreTrainedModel, policy: Policy, ids: Tensor) -> KVCache:
    cache = KVCache(model.config, policy, prompt_length=ids.shape[1])
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.inference_mode()
def decode(model: PreTrainedModel, cache: KVCache, tokens: int) -> list[float]:
    """Seconds of each decoding step."""
    device, token = model.device.type, torch.zeros(1, 1, dtype=torch.long, device=model.device)
    seconds = []
    for _ in range(tokens):
        began = now(device)
        model(token, past_key_values=cache)
        seconds.append(now(device) - began)
    return seconds


def filled(policy: Policy, keys: Tensor, values: Tensor) -> LayerStore:
    """A layer's store after one prompt."""
    held = policy.store.for_layer(2).open(keys, values, (), 1)
    take_in(held, keys, values, 0)
    return held


def take_in(held: LayerStore, keys: Tensor, values: Tensor, start: int) -> float:
    """Give a store tokens [1,H,n,D] from position `start` on, as a cache does; returns the seconds of its settling."""
    positions = torch.arange(start, start + keys.shape[2], device=keys.device)[None]
    queries, scaling = keys.repeat_interleave(2, dim=1), keys.shape[3] ** -0.5
    held.append(keys, values, positions, absent=False)
    if held.watching:
        seen = positions[:, -1] + 1
        view = Observation(0, queries, positions, held.keys, held.values, held.positions, seen, scaling, "block")
        held.observe(view, [keys.shape[2]])
    held.attend(queries, positions, AttentionParams(scaling))
    began = now(keys.device.type)
    held.settle()
    return now(keys.device.type) - began


@torch.inference_mode()
def check(policy: Policy, keys: Tensor, values: Tensor) -> None:
    """A wrong answer has no speed: the store's own attention against attention over its view, in float64."""
    held, dim = filled(policy, keys, values), keys.shape[3]
    queries = torch.randn(1, 2 * keys.shape[1], 1, dim, device=keys.device)
    out = held.attend(queries, torch.tensor([[keys.shape[2] - 1]]).to(keys.device), AttentionParams(dim**-0.5))
    assert out is not None, f"{policy.name} holds no codes at this length"
    wide_keys, wide_values = (x.double().repeat_interleave(2, dim=1) for x in (held.keys, held.values))
    expected = (queries.double() @ wide_keys.mT * dim**-0.5).softmax(-1) @ wide_values
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def flush_seconds(policy: Policy, keys: Tensor, values: Tensor, span: int) -> float:
    """What the one flush among `span` decoded tokens takes in one layer, beyond other steps' settling."""
    held, prompt = filled(policy, keys[:, :, :-span], values[:, :, :-span]), keys.shape[2] - span
    steps = (slice(t, t + 1) for t in range(prompt, prompt + span))
    seconds = [take_in(held, keys[:, :, t], values[:, :, t], t.start) for t in steps]
    return max(seconds) - statistics.median(seconds)


def flush_span(policy: Policy) -> int:
    """Tokens between two flushes of a store (KIVI's values go one by one: that is part of every step)."""
    store = policy.store
    for name in ("gap", "group") if isinstance(store, Ott) else ("gap", "residual", "group"):
        if getattr(store, name, None):
            return int(getattr(store, name))
    raise AssertionError(store)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompt", 4096), ("tokens", 8), ("repeats", 11), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stores", default=STORES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    policies = [make_policy(slug) for slug in ("full", *args.stores.split(","))]
    model = prepare(model_of(args.device))
    config = model.config
    ids = torch.randint(0, config.vocab_size, (1, args.prompt), device=args.device)
    keys, values = torch.randn(2, 1, config.num_key_value_heads, args.prompt, config.head_dim, device=args.device)
    for policy in policies[1:]:
        check(policy, keys, values)
    steps: dict[str, list[float]] = {policy.name: [] for policy in policies}
    flushes: dict[str, list[float]] = {policy.name: [] for policy in policies}
    caches = {policy.name: prefilled(model, policy, ids) for policy in policies}
    for _ in range(args.repeats + 1):  # the first round warms up and is dropped
        for policy in policies:
            steps[policy.name].append(statistics.median(decode(model, caches[policy.name], args.tokens)))
            if policy.name != "full":
                flushes[policy.name].append(flush_seconds(policy, keys, values, flush_span(policy)))
    rows = []
    for policy in policies:
        step, flush = steps[policy.name][1:], flushes[policy.name][1:]
        # Ratios are taken within a round, where the machine was equally busy, then the median of them.
        ratio = statistics.median(own / full for own, full in zip(step, steps["full"][1:], strict=True))
        share = 0.0
        if flush:
            layers = config.num_hidden_layers / flush_span(policy)
            share = 100 * statistics.median(f * layers / s for f, s in zip(flush, step, strict=True))
        rows.append((policy.name, statistics.median(step) * 1e3, ratio, share))
    title = f"after {args.prompt} tokens, {args.device}, {args.threads} threads, torch {torch.__version__}"
    table = Table("policy", "decode ms/token", "x full", "flush, % of the steps it spans", title=title)
    for name, *numbers in rows:
        table.add_row(name, *(f"{n:.2f}" for n in numbers))
    Console().print(table)
    if args.csv:
        with args.csv.open("a", newline="") as file:
            stamp = (platform.processor(), torch.__version__, transformers.__version__, args.prompt, args.threads)
            csv.writer(file).writerows((*row, *stamp) for row in rows)


if __name__ == "__main__":
    main()
