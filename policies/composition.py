"""The parts of a policy, as given or settled."""

from dataclasses import dataclass, field
from typing import Literal

from kvbench.policies.allocators.allocator import Allocator
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.mergers.drop import Drop
from kvbench.policies.mergers.merger import Merger
from kvbench.policies.pre_passes.pre_pass import PrePass
from kvbench.policies.readers.reader import Reader
from kvbench.policies.schedule import Prompt, Schedule
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.selections.selection import Selection
from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.store import Store
from kvbench.policies.values.value import ValueAware

Budget = int | float | None


@dataclass(frozen=True)
class Composition:
    """The parts of a policy. scorer None keeps every token (`full`).

    budget: tokens per KV head per layer on average (int), or that share of the prompt (float below 1); it includes
    window and sinks; always None if the allocator determines the budget. granularity: one token set per `kv_head`, one
    per `query_head` (keys and values are then stored H_q / H_kv times, and the budget counts per query head), or one
    for all heads of a `layer`. selection: units of tokens that are kept or evicted together; None: single tokens.
    reader: sparse attention, in which a decoded query reads `budget` of all tokens. pre_pass: forward passes before
    eviction; defaults to the scorer's pre-pass and works only with kvbench's generation loop.
    """

    scorer: Scorer | None = None
    value: ValueAware | None = None
    selection: Selection | None = None
    allocator: Allocator = field(default_factory=Uniform)
    merger: Merger = field(default_factory=Drop)
    store: Store = field(default_factory=Dense)
    schedule: Schedule = field(default_factory=Prompt)
    reader: Reader | None = None
    granularity: Literal["kv_head", "query_head", "layer"] = "kv_head"
    pre_pass: PrePass | None = None
    budget: Budget = None
    name: str = "policy"
