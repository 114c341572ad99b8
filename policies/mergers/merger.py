"""The contract of a merger: what becomes of the evicted."""

from abc import ABC
from typing import ClassVar


class Merger(ABC):
    """Decides whether evicted tokens leave a trace in kept ones. Subclasses are frozen dataclasses of their knobs."""

    merges: ClassVar[bool]
    """Whether kept keys or values may change at an eviction."""
