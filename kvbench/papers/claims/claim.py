"""What a claim is, and what can be said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Says = Literal["every", "most", "average"]
Verdict = Literal["holds", "fails", "cannot be told", "no data"]
DIGITS = 6  # printed numbers have up to four; what floats add beyond is none of theirs


@dataclass(frozen=True)
class Cell:
    """One number that bears on a claim: where it stands, by how much it speaks for it, and how much it has to.

    gain: in the unit of the claim, higher is better for it. It supports the claim from `least` (above it, where `least`
    is 0: no difference is none) up to `most`.
    """

    where: str
    gain: float
    least: float = 0.0
    most: float = float("inf")

    @property
    def sign(self) -> int:
        """1: supports, -1: contradicts, 0: a tie (a gain of exactly 0 where more than 0 was claimed)."""
        if self.gain == self.least == 0:
            return 0
        return 1 if self.least <= self.gain <= self.most else -1


@dataclass(frozen=True)
class Evidence:
    """The cells of a claim; lost: how many more there would be, were not the method's number printed alone.

    missing: where there is no cell, which numbers are missing and what would give them.
    """

    cells: tuple[Cell, ...] = ()
    lost: int = 0
    missing: str = ""


class Source(Protocol):
    """Where the cells of a claim come from: published numbers, arithmetic on them, or our own code."""

    @property
    def unit(self) -> str:
        """Of the gains."""

    def evidence(self) -> Evidence:
        """All cells that bear on the claim."""


@dataclass(frozen=True)
class Trial:
    """How runs of ours decide a claim: (policy, rival) on the same examples, and the command that makes such runs.

    budgets: only runs of these, any if empty. options: further fields of the command, so that both sides share a
    schedule. apart: every subset of a benchmark is a comparison of its own. least: gain in score (0 to 1) to reach.
    factor: the multiple of the rival's score to pass. falling: what is compared is the gain at a budget with that at
    the next larger one.
    """

    pairs: tuple[tuple[str, str], ...]
    model: str
    task: str
    budgets: tuple[int | float, ...] = ()
    options: str = ""
    apart: bool = False
    least: float = 0.0
    factor: float = 1.0
    falling: bool = False

    @property
    def command(self) -> str:
        """Runs both sides of every pair."""
        policies = dict.fromkeys(name for pair in self.pairs for name in pair)
        budget = f" budget={','.join(map(str, self.budgets))}" if self.budgets else ""
        options = f" {self.options}" if self.options else ""
        return f"python -m kvbench -m model={self.model} task={self.task} policy={','.join(policies)}{budget}{options}"


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper as a check.

    sentence: as printed, shortened only at its ends; where `ours` it is a hypothesis that follows from the paper's
    numbers or code and not its words. decided_by: what would decide it. says: whether it is about every cell, most of
    them or their mean. trial: None where no runs can decide it; elsewhere: the command that can, if not a trial.
    """

    paper: str
    name: str
    sentence: str
    section: str
    decided_by: str
    source: Source
    says: Says = "every"
    trial: Trial | None = None
    elsewhere: str = ""
    ours: bool = False
    note: str = ""
