"""What the larger pocket model practises when: families of exercises climb from short to long texts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
from pocket_families import FAMILIES, LENGTHS

log = logging.getLogger("train_pocket")
LEARNT = 0.92  # running share of the answers' tokens met, at which a family goes on to the next length
FORCED = (0.0, 0.12, 0.22, 0.34, 0.46)  # share of the time at which every family has reached a length


@dataclass(frozen=True)
class Larger:
    """What decides the weights, apart from the code and the speed of the machine."""

    seed: int = 21
    minutes: float = 8.3
    tokens: int = 65_280  # per step, a multiple of every length
    rate: float = 2e-3
    warmup: int = 150
    decay: float = 0.3  # last share of the time, in which the learning rate falls to zero
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head: int = 64
    mlp: int = 512
    context: int = 4352
    theta: float = 5e5
    device: str = "cuda"
    workers: int = 14


@dataclass
class Standing:
    """Where the training stands."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    reached: list[int] = field(default_factory=lambda: [0] * len(FAMILIES))
    since: list[int] = field(default_factory=lambda: [0] * len(FAMILIES))  # readings at the length reached
    met: list[list[float]] = field(default_factory=lambda: [[0.0] * len(LENGTHS) for _ in FAMILIES])


def shares_of(at: Standing, share: float) -> np.ndarray:
    """How many of the tokens go to each family at each length, [families, lengths], not normalised.

    A family practises most at the shortest length that it has not learnt; what it has learnt keeps a quarter.
    """
    shares = np.zeros((len(FAMILIES), len(LENGTHS)))
    for row, family in enumerate(FAMILIES):
        reached, met = at.reached[row], at.met[row]
        focus = next((level for level in range(reached) if met[level] < LEARNT), reached)
        for level in range(reached + 1):
            need = 0.25 + min(1.0, 8 * (1 - met[level]))
            shares[row, level] = family.share * need * 0.6 ** abs(focus - level)
    copying = next(row for row, family in enumerate(FAMILIES) if family.name == "copy")
    shares[copying] *= 10.0 if at.met[copying][0] < 0.8 and share < 0.2 else 0.15 if share > 0.2 else 1.0
    return shares


def climb(at: Standing, share: float) -> None:
    """Let families that answer well, or whose time has come, go on to longer texts."""
    due = max(level for level, begins in enumerate(FORCED) if share >= begins)
    for row in range(len(FAMILIES)):
        level = at.reached[row]
        learnt = at.met[row][level] >= LEARNT and at.since[row] >= 3
        if level < len(LENGTHS) - 1 and (learnt or level < due):
            log.info("%4.0f s  %s reaches %d", at.seconds, FAMILIES[row].name, LENGTHS[level + 1])
            at.reached[row], at.since[row] = level + 1, 0
            at.met[row][level + 1] = max(at.met[row][level + 1], at.met[row][level] * 0.8)
