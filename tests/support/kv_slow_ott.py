"""OTT for one KV head, token by token in plain Python: slow, and written from the method's definition alone."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass
class Entry:
    score: float
    position: int
    key: Vector
    value: Vector


def quantised(group: Vector, bits: int) -> Vector:
    """What the numbers of one group become."""
    low, high = group.min(), group.max()
    step = (high - low) / (2**bits - 1)
    return group.copy() if step == 0 else np.round((group - low) / step) * step + low


@dataclass
class SlowOtt:
    """State of one head; `append` a token, then the step's flush follows."""

    group: int
    residual: int
    outliers: int
    auxiliary: int
    bits: int = 2
    fill: str = "mean"
    on_evict: str = "pool"
    norm: int = 1
    store: list[tuple[Vector, Vector]] = field(default_factory=list)
    buffer: list[tuple[Vector, Vector]] = field(default_factory=list)
    pool: list[Entry] = field(default_factory=list)
    spare: list[Entry] = field(default_factory=list)
    frozen: bool = False

    def append(self, key: Vector, value: Vector) -> None:
        self.buffer.append((key, value))
        while len(self.buffer) >= self.residual + self.group:
            due, self.buffer = self.buffer[: self.group], self.buffer[self.group :]
            self.flush(due)

    def flush(self, due: list[tuple[Vector, Vector]]) -> None:
        first = len(self.store)
        keys, values = (np.array([token[i] for token in due]) for i in (0, 1))
        admitted = self.compete(keys, values, first)
        for x in (keys, values):
            rows = [i for i in range(len(due)) if i not in admitted] if self.fill == "inlier_mean" else range(len(due))
            mean = x[list(rows) or list(range(len(due)))].mean(0)
            for i in admitted:
                x[i] = mean
        for channel in range(keys.shape[1]):
            keys[:, channel] = quantised(keys[:, channel], self.bits)
        channels = min(self.group, values.shape[1])
        for row in values:
            for start in range(0, len(row), channels):
                row[start : start + channels] = quantised(row[start : start + channels], self.bits)
        self.store += list(zip(keys, values, strict=True))

    def compete(self, keys: Vector, values: Vector, first: int) -> list[int]:
        """Update the pools; returns which tokens of the group are admitted."""
        if self.outliers == 0 or self.frozen:
            return []
        scores = np.linalg.norm(keys, ord=self.norm, axis=1)
        new = [Entry(s, first + i, keys[i].copy(), values[i].copy()) for i, s in enumerate(scores)]
        ranked = sorted(self.pool + new, key=lambda e: (e.score, e.position))
        winners = ranked[: self.outliers]
        positions = {e.position for e in winners}
        defeated = [e for e in self.pool if e.position not in positions]
        if self.on_evict == "pool":
            if len(self.spare) + len(defeated) > self.auxiliary:
                self.frozen = True
                return []
            self.spare += defeated
        self.pool = winners
        return [e.position - first for e in winners if e.position >= first]

    def view(self) -> tuple[Vector, Vector]:
        """Keys and values of every token, exact where they are."""
        tokens = self.store + self.buffer
        keys, values = (np.array([token[i] for token in tokens]) for i in (0, 1))
        for entry in self.pool + self.spare:
            keys[entry.position], values[entry.position] = entry.key, entry.value
        return keys, values

    def attend(self, query: Vector) -> Vector:
        """One softmax over three caches, every token in exactly one of them."""
        covered = {e.position for e in self.pool + self.spare}
        tokens = [t for i, t in enumerate(self.store) if i not in covered] + self.buffer
        tokens += [(e.key, e.value) for e in self.pool + self.spare]
        logits = np.array([query @ key for key, _ in tokens]) / np.sqrt(len(query))
        weights = np.exp(logits - logits.max())
        return weights @ np.array([value for _, value in tokens]) / weights.sum()
