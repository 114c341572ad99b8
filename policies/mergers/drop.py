"""Evicted tokens are gone."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.policies.mergers.merger import Merger


@dataclass(frozen=True)
class Drop(Merger):
    """Nothing of an evicted token stays; kept keys and values are untouched to the bit."""

    merges: ClassVar[bool] = False
