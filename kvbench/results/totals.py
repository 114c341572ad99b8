"""Times and tokens of a session in which several runs are computed as one batch (`engine.json`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.results.files import write_json

FILE_NAME = "engine.json"

log = logging.getLogger(__name__)


@dataclass
class Totals:
    """Counts of one session. Seconds are wall time; a row is a sequence: one example under one policy."""

    rows: int = 0
    prefills: int = 0
    prompt_tokens: int = 0  # of the prefills; a shared prefill counts once
    prefill_seconds: float = 0.0
    steps: int = 0  # each decodes one token of all rows in flight
    decoded_tokens: int = 0  # sum of rows in flight over the steps
    decode_seconds: float = 0.0
    most_rows: int = 0

    def prefilled(self, prompt_tokens: int, rows: int, seconds: float) -> None:
        """Count one prefill of a prompt, which serves `rows` rows."""
        self.rows += rows
        self.prefills += 1
        self.prompt_tokens += prompt_tokens
        self.prefill_seconds += seconds

    def stepped(self, rows: int, seconds: float) -> None:
        """Count one decoding step of `rows` rows."""
        self.steps += 1
        self.decoded_tokens += rows
        self.decode_seconds += seconds
        self.most_rows = max(self.most_rows, rows)

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens of all rows per second; 0 before the first step."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def rows_per_step(self) -> float:
        """Mean number of rows per step; 0 before the first step."""
        return self.decoded_tokens / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        return (
            f"{self.prefills} prefills in {self.prefill_seconds:.1f} s, shared by {self.rows} sequences; "
            f"{self.steps} decoding steps in {self.decode_seconds:.1f} s: {self.rows_per_step:.1f} sequences a step, "
            f"{self.tokens_per_second:.0f} tokens/s"
        )

    def described(self) -> dict[str, Any]:
        """All counts and means as plain data."""
        means = {"rows_per_step": self.rows_per_step, "tokens_per_second": self.tokens_per_second}
        return {name: round(value, 6) for name, value in {**vars(self), **means}.items()}


def record(places: Mapping[Path, str], totals: Totals) -> None:
    """Add a session to `engine.json` of every run that it computed."""
    session = {"runs": list(places.values()), **totals.described()}
    for place in places:
        _add(place / FILE_NAME, [session])


def _add(path: Path, sessions: Sequence[dict[str, Any]]) -> None:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["sessions"] if path.exists() else []
        write_json(path, {"sessions": [*before, *(session for session in sessions if session not in before)]})
    except (OSError, ValueError, KeyError) as error:  # for example a full disk: the run itself is not affected
        log.warning("%s could not be written: %s", path, error)
