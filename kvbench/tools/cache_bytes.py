"""Exact bytes of a policy's cache after a prompt, computed without weights (`kvbench memory`).

The stores run on tensors without data (meta device), so that a prediction equals a measurement.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from kvbench.cache.layer import RecentQueries
from kvbench.cache.reading import PageReads
from kvbench.config.folders import own_folders
from kvbench.config.presets import make_policy
from kvbench.errors import refusing, unknown
from kvbench.models.cache_shapes import DTYPES, CacheShape, cache_shape
from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.latents import check_latents
from kvbench.policies.policy import Policy, layer_budgets
from kvbench.policies.policy_checks import check_layers
from kvbench.policies.stores.store import LayerStore
from kvbench.report.text_table import TextTable, table_of, text
from kvbench.terminal.command import pairs, terminal_width

STATES = "states"
MIB = 2**20
MOST = 10**9  # tokens or sequences; tensors cannot be larger


@dataclass(frozen=True)
class Prediction:
    """Bytes of a cache after a prompt of `length` tokens in each of `batch` sequences.

    parts: bytes in use, by kind. spare: bytes reserved for tokens that decoding appends before it evicts.
    """

    shape: CacheShape
    length: int
    batch: int
    parts: dict[str, int]
    spare: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in use: `held_nbytes` of the cache."""
        return sum(self.parts.values())

    @property
    def numbers(self) -> int:
        """Number of key and value elements of the prompt."""
        return self.shape.numbers * self.length * self.batch

    @property
    def bits(self) -> float:
        """Bits per number of the prompt's keys and values."""
        return 8 * (self.nbytes - self.parts.get(STATES, 0)) / self.numbers

    @property
    def ratio(self) -> float:
        """Size of a 16-bit cache of all keys and values, divided by the size of this one."""
        return 16 / self.bits


def predict(policy: Policy, shape: CacheShape, length: int, batch: int = 1) -> Prediction:
    """The exact used and spare bytes of a cache after a prompt, over all its layers.

    If the last block of the prompt is a single token, 8 bytes per KV head (the index of a free slot) are missing.
    Raises ValueError if the size depends on the content of the prompt (budgets by statistics or per head, mergers),
    and for policies that do not support latents if the model has them.
    """
    check_predictable(policy)
    if shape.kv_lora_rank:
        check_latents(policy)
    budgets = layer_budgets(policy, shape.layers, length) if policy.evicts else [length] * shape.layers
    sizes: dict[tuple[Any, ...], tuple[dict[str, int], int]] = {}
    total: Counter[str] = Counter()
    spare = 0
    for layer, budget in enumerate(budgets):
        reads_all = policy.reader is None or policy.reader.reads_all(layer)
        key = (policy.store.for_layer(layer), budget, reads_all, shape.layer(layer))
        if key not in sizes:
            sizes[key] = _layer_parts(policy, shape, layer, length, budget)
        total.update(sizes[key][0])
        spare += sizes[key][1]
    total.update({STATES: shape.state_bytes} if shape.state_bytes else {})
    return Prediction(shape, length, batch, {kind: batch * size for kind, size in total.items()}, batch * spare)


def check_predictable(policy: Policy) -> None:
    """Raise ValueError if the size of a cache does not only depend on lengths and budgets."""
    by_statistics = isinstance(policy.allocator, StatisticAllocator)
    reasons = {
        "distributes its budget over layers by statistics of the prompt": by_statistics,
        "distributes its budget over KV heads by statistics of the prompt": policy.allocator.per_head,
        "stores statistics of merged tokens": policy.merger.merges,
        "stores statistics per layer": policy.needs.memory,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"{policy.name} {reason}, so its bytes cannot be predicted: run it")


def _layer_parts(policy: Policy, shape: CacheShape, layer: int, length: int, budget: int) -> tuple[dict[str, int], int]:
    """Used bytes of one layer, by kind, and its spare bytes."""
    held = _store(policy, shape, layer, length, budget)
    dim = shape.head_dim if shape.kv_lora_rank else shape.layer(layer)[1]
    queries, pages = _recent(policy, shape, dim, length), _pages(policy, layer, held, length)
    parts = {**held.sizes().kinds, "queries": queries, "page summaries": pages}
    if not (policy.evicts and length > budget and policy.schedule.spare):
        return parts, 0
    return parts, _store(policy, shape, layer, length, budget, policy.schedule.spare).nbytes - held.nbytes


def _store(policy: Policy, shape: CacheShape, layer: int, length: int, budget: int, spare: int = 0) -> LayerStore:
    """One layer's store after the prompt, with `spare` more slots, on the meta device."""
    own, *stored = shape.layer(layer)
    heads = shape.query_heads if policy.granularity == "query_head" else own
    width = shape.query_heads // heads if policy.needs.query_heads else 1
    keys, values = (torch.empty(1, heads, length, n, dtype=shape.dtype, device="meta") for n in stored)
    held = policy.store.for_layer(layer).open(keys, values, policy.needs.statistics, width)
    held.append(keys, values, torch.empty(1, length, dtype=torch.long, device="meta"))
    if policy.evicts and length > budget:
        held.keep(torch.empty(1, heads, length, dtype=torch.bool, device="meta"), spare, budget)
    held.settle()
    return held


def _pages(policy: Policy, layer: int, held: LayerStore, length: int) -> int:
    """Bytes of the page summaries of sparse attention; if tokens are evicted, there are none before decoding."""
    if policy.reader is None or policy.reader.evicts or policy.reader.reads_all(layer):
        return 0
    pages = PageReads(policy, layer)
    pages.summarise(held, held.positions.shape[2], length)
    return pages.nbytes


def _recent(policy: Policy, shape: CacheShape, dim: int, length: int) -> int:
    """Bytes of the queries, of `dim` numbers each, that a layer stores for its scorer."""
    recent = RecentQueries(policy.needs.window)
    if policy.evicts:
        queries = torch.empty(1, shape.query_heads, length, dim, dtype=shape.dtype, device="meta")
        recent.add(queries, torch.empty(1, length, dtype=torch.long, device="meta"))
        recent.limit(policy.needs.window_decoding or 0)
        recent.copy()
    return recent.nbytes


# --- the command line ----------------------------------------------------------------------------------------------
def print_sizes(arguments: Sequence[str], config_dir: Path | None = None) -> None:
    """Print the table of `kvbench memory key=value ...`. Raises UsageError."""
    with refusing():
        folders = own_folders(config_dir)
        words = pairs(arguments, "model=llama2_7b or length=4096,32768")
        shape = cache_shape(words.pop("model", "pocket"), folders)
        if "dtype" in words:
            shape = replace(shape, dtype=_dtype(words.pop("dtype")))
        lengths = _numbers("length", words.pop("length", "4096"))
        batches = _numbers("batch", words.pop("batch", "1"))
        slugs = words.pop("policy", "full").split(",")
        fields_given = {name: _value(name, value) for name, value in words.items()}
        budget = fields_given.pop("budget", None)
        for name in {"slug", "config_dir"} & fields_given.keys():
            raise ValueError(f"{name}={fields_given[name]} is not a field")
        folder: dict[str, Any] = {"config_dir": folders[0]} if folders else {}
        policies = [make_policy(slug, budget, **folder, **fields_given) for slug in slugs]
        for policy in policies:
            if policy.generator is not None:
                raise ValueError(f"the bytes of {policy.name} cannot be predicted: run it")
            check_layers(shape.layers, policy.store, policy.pre_pass)
            policy.allocator.check_heads([shape.layer(index)[0] for index in range(shape.layers)])
        table = _sizes(policies, shape, lengths, batches)
    if budget is not None and not any(policy.evicts or policy.reader is not None for policy in policies):
        sys.stderr.write(f"kvbench: budget={budget} is ignored: {', '.join(slugs)} keeps every token\n")
    sys.stdout.write(text(table, terminal_width()))


def _value(key: str, text: str) -> Any:  # noqa: ANN401 - any YAML value
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{key}={text} is not valid YAML") from error


def _numbers(name: str, text: str) -> list[int]:
    """A list of whole numbers of at least 1; ValueError otherwise."""
    for number in text.split(","):
        if not (number.isdecimal() and 1 <= int(number) <= MOST):
            raise ValueError(f"{name}={number} must be a whole number from 1 to {MOST}")
    return [int(number) for number in text.split(",")]


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise unknown("dtype", name, list(DTYPES))
    return DTYPES[name]


def _sizes(policies: Sequence[Policy], shape: CacheShape, lengths: Sequence[int], batches: Sequence[int]) -> TextTable:
    """Bytes by kind, one row per policy, length and batch."""
    found = [(p, predict(p, shape, length, batch)) for p in policies for length in lengths for batch in batches]
    kinds = dict.fromkeys(kind for _, one in found for kind, nbytes in one.parts.items() if nbytes)
    rows = []
    reserved = any(p.spare for _, p in found)
    for policy, p in found:
        mib = (f"{p.parts.get(kind, 0) / MIB:.2f}" for kind in kinds)
        sums = (f"{p.nbytes / MIB:.2f}", f"{p.nbytes}", f"{p.bits:.3f}", f"{p.ratio:.3f}")
        spare = (f"{p.spare / MIB:.2f}",) * reserved
        rows.append((policy.name, f"{p.length}", f"{p.batch}", *mib, *sums, *spare))
    dtype = str(shape.dtype).removeprefix("torch.")
    heads = dict.fromkeys(f"{heads} KV heads of {dim}" for heads, dim, _ in map(shape.layer, range(shape.layers)))
    each = " or ".join(heads)
    if shape.kv_lora_rank:
        each = f"a latent of {shape.kv_lora_rank} + {shape.qk_rope_head_dim} a token"
    title = f"MiB held after a prompt; {shape.layers} layers, {each}, {dtype}"
    names = ("policy", "length", "batch", *kinds, "MiB", "bytes", "bits/number", "16-bit/this")
    note = "spare MiB: reserved for tokens that decoding appends before it evicts, in addition to the bytes held"
    return table_of((*names, *("spare MiB",) * reserved), rows, title, left=("policy",), notes=(note,) * reserved)
