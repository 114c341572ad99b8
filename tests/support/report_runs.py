"""Made-up runs with all that a report says of them, which is more than a picture does."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plotted_runs import write_run

from kvbench.records.sample import Sample

ENVIRONMENT: dict[str, Any] = {
    "packages": {"kvbench": "0.1.0", "torch": "2.13.0", "triton": None},
    "python": "3.11.7",
    "kvbench_revision": "cafe",
    "hardware": {
        "platform": "Linux",
        "processor": "a processor",
        "cpus": 2,
        "torch_threads": 1,
        "memory_bytes": 2**34,
        "device": "cpu",
        "device_name": None,
    },
}


def answered(index: int, score: float, output: str = "x", prompt: str = "", **metadata: Any) -> Sample:
    """One example: a right or wrong answer, and bytes held of 64 tokens in each of two layers' two heads."""
    return Sample(
        index,
        prompt or f"{index:064d}",
        1000,
        ["4711"],
        metadata,
        output=output,
        score=score,
        kept_tokens=[[60, 68], [64, 64]],
        cache_bytes=2**20,
        peak_bytes=2**21,
        spare_bytes=0,
        full_cache_bytes=2**24,
        generated_tokens=4,
        decode_steps=4,
    )


def reported_run(
    out: Path, policy: str, samples: Sequence[Sample], budget: int | float | None = 64, **given: Any
) -> Path:
    """One finished run; environment: fields that are not those of ENVIRONMENT."""
    environment = {**ENVIRONMENT, **given.pop("environment", {})}
    folder = write_run(out, policy, samples, budget, **given)
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = [{k: v for k, v in line.items() if not (k == "kept_heads" and v is None)} for line in lines]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    return folder
