"""A watcher that lists every evicted token."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.cache.sequence import CachedSequence
from kvbench.cache.watcher import Watcher


@dataclass
class Ledger(Watcher):
    """Lists (tokens seen, layer, KV head, position) of every evicted token."""

    name = "ledger"

    def __post_init__(self) -> None:
        self.lines: list[tuple[int, int, int, int]] = []

    def evicted(self, layer: int, gone: Tensor, seen: int) -> None:
        assert gone.shape[1] == seen
        self.lines += [(seen, layer, head, position) for head, position in gone.nonzero().tolist()]

    def value(self) -> float | None:
        return float(len(self.lines)) if self.lines else None


def ledger_of(sequence: CachedSequence) -> list[tuple[int, int, int, int]]:
    (watcher,) = sequence.watchers
    assert isinstance(watcher, Ledger)
    return watcher.lines
