"""`metrics.json`: the numbers of a run, and a digest of the samples and code that they were computed from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.results import averages, statistics
from kvbench.results import metrics as computing
from kvbench.results.averages import of_prompts
from kvbench.results.files import write_json
from kvbench.results.sample import Sample
from kvbench.results.samples import FILE_NAME as SAMPLES
from kvbench.tasks.summary import summary, summary_module

FILE_NAME = "metrics.json"
DIGEST = "computed_from"
"""The key of the digest: of the bytes of the samples and of the code that computes the numbers."""
_CODE = b"".join(Path(str(module.__file__)).read_bytes() for module in (averages, computing, statistics))


def write_metrics(folder: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Compute and write the numbers of a finished run. Raises OSError."""
    found = computing.metrics(samples)
    write_json(folder / FILE_NAME, {**found, DIGEST: _digest(folder, samples)})
    return found


def read_metrics(folder: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """The numbers of a run with these samples: read if the digest fits, otherwise computed.

    The aggregates of a benchmark's own code are always computed, because the digest may not cover that code.
    """
    found = summed_up(folder, samples)
    return computing.metrics(samples) if found is None else {**found, "official": summary(samples)}


def summed_up(folder: Path, samples: Sequence[Sample]) -> dict[str, Any] | None:
    """The content of metrics.json if its digest fits the samples on disk and this code, else None."""
    try:
        numbers: dict[str, Any] = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        if len(of_prompts(samples)) == numbers["n"] and numbers.pop(DIGEST) == _digest(folder, samples):
            return numbers
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # missing, or of another version
        pass
    return None


def _digest(folder: Path, samples: Sequence[Sample]) -> str:
    benchmark = summary_module(samples)
    code = _CODE if benchmark is None else _CODE + Path(str(benchmark.__file__)).read_bytes()
    return hashlib.sha256(code + (folder / SAMPLES).read_bytes()).hexdigest()
