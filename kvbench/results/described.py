"""What a run computed: its model, policy, task and settings, and the words for them in tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kvbench.results.labels import Naming, briefly, compressed, evicts, keeps_all, moments


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Described:
    """The configuration of a run.

    model, policy, task: names of presets. labels: the same with the fields that differ from the presets or between the
    rows of a table. identity: all settings that change a result. environment: the machine and its software.
    """

    run_id: str
    model: str
    policy: str
    task: str
    identity: Mapping[str, Any]
    environment: Mapping[str, Any]
    naming: Naming
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def budget(self) -> int | float | None:
        """Tokens per KV head and layer, or share of the prompt; None if nothing is evicted."""
        return cast("int | float | None", self.identity["budget"])

    @property
    def budget_kind(self) -> str:
        """The unit of the budget."""
        return "none" if self.budget is None else "tokens_per_head" if isinstance(self.budget, int) else "share"

    @property
    def weights(self) -> str | None:
        """Hub id and commit, or sha256 of the files."""
        return "@".join(self.identity["model"].values()) or None

    @property
    def device(self) -> str | None:
        """The GPU or processor that computed it."""
        hardware = self.environment.get("hardware")
        return None if hardware is None else str(hardware["device_name"] or hardware["processor"])

    @property
    def model_label(self) -> str:
        """The model with its differing fields, for titles."""
        return self.labels.get("model", self.model)

    @property
    def task_label(self) -> str:
        """The task with its differing fields, for titles."""
        return self.labels.get("task", self.task)

    @property
    def compress(self) -> str:
        """What was compressed: the prompt, or the context before its question."""
        return compressed(self.identity)

    @property
    def schedule(self) -> str | None:
        """When tokens of the prompt are evicted: "prompt", "blocks of 128"; None if nothing is evicted."""
        return moments(self.identity)[0]

    @property
    def decode(self) -> str | None:
        """Whether decoding evicts or grows."""
        return moments(self.identity)[1]

    @property
    def moments(self) -> tuple[str, str]:
        """Schedule and decoding rule: ("blocks of 128", "evict"), ("m=4", "") for texts, ("", "") without eviction."""
        if not self.evicts or self.naming.reads is not None:
            return self.naming.reads or "" if self.evicts else "", ""
        return (briefly(self.identity), self.decode) if self.decode else ("", "")

    @property
    def when(self) -> str:
        """`moments` as one text: "blocks of 128, evict". Only rows with the same text are comparable."""
        return ", ".join(filter(None, self.moments))

    @property
    def evicts(self) -> bool:
        """Whether the policy evicts tokens."""
        return evicts(self.identity)

    @property
    def is_full(self) -> bool:
        """Whether the run keeps the full cache, whatever the policy's name."""
        return keeps_all(self.identity)

    @property
    def setting(self) -> tuple[str, ...]:
        """The fields that two results must share to be compared example by example."""
        return tuple(str(self.identity.get(name)) for name in ("model", "dtype", "task", "seed", "generation"))
