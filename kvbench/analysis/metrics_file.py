"""`metrics.json`: the numbers of a run, and a digest of what they were computed from, by which they are read back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.analysis import averages, statistics
from kvbench.analysis import metrics as computing
from kvbench.analysis.averages import of_prompts
from kvbench.records.files import write_json
from kvbench.records.sample import Sample
from kvbench.records.samples import FILE_NAME as SAMPLES
from kvbench.tasks.summary import summary, summary_module

FILE_NAME = "metrics.json"
DIGEST = "computed_from"
"""Of the samples, byte for byte, and of the code that makes numbers of them."""
_CODE = b"".join(Path(str(module.__file__)).read_bytes() for module in (averages, computing, statistics))


def write_metrics(folder: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Sum up a run whose samples are all on disk. Raises OSError."""
    found = computing.metrics(samples)
    write_json(folder / FILE_NAME, {**found, DIGEST: _digest(folder, samples)})
    return found


def read_metrics(folder: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """The numbers of a run with these samples: read where they were computed from them by this code, else computed.

    What a benchmark's own code says of them is always computed: it may be anybody's, and no digest is of it.
    """
    found = summed_up(folder, samples)
    return computing.metrics(samples) if found is None else {**found, "official": summary(samples)}


def summed_up(folder: Path, samples: Sequence[Sample]) -> dict[str, Any] | None:
    """What metrics.json says, where this code computed it from these samples, as they lie on disk."""
    try:
        found: dict[str, Any] = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        if len(of_prompts(samples)) == found["n"] and found.pop(DIGEST) == _digest(folder, samples):
            return found
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # none, or another version's
        pass
    return None


def _digest(folder: Path, samples: Sequence[Sample]) -> str:
    benchmark = summary_module(samples)
    own = b"" if benchmark is None else Path(str(benchmark.__file__)).read_bytes()
    return hashlib.sha256(_CODE + own + (folder / SAMPLES).read_bytes()).hexdigest()
