"""Evict without merging."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.policies.mergers.merger import Merger


@dataclass(frozen=True)
class Drop(Merger):
    """Evicted tokens are dropped; kept keys and values do not change."""

    merges: ClassVar[bool] = False
