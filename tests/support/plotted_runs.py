"""Finished runs as they lie on disk, made up: the scores are given, everything else is told by a few words."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.scores import summary
from kvbench.results.files import write_json, write_yaml
from kvbench.results.metrics import write_metrics
from kvbench.results.samples import Sample
from kvbench.results.summary import write_summary

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


def described(
    scorer: str | None, value: str | None = None, decode: str = "evict", size: int | None = None, **knobs: Any
) -> dict:
    """A policy's parts as runs describe them."""
    schedule = {"class": "Prompt", "decode": decode} | ({} if size is None else {"class": "Blocks", "size": size})
    part = {"class": f"kvbench.policies.scorers.{scorer.lower()}.{scorer}", **knobs} if scorer else None
    return {
        "class": "kvbench.policies.policy.Policy",
        "scorer": part,
        "value": {"class": value} if value else None,
        "store": {"class": "kvbench.policies.stores.dense.Dense"},
        "schedule": schedule,
    }


POLICIES: dict[str, dict[str, Any]] = {
    "snapkv": described("SnapKV", decode="grow"),
    "caote_snapkv": described("SnapKV", "Caote", size=128),
    "fastcaote_snapkv": described("SnapKV", "FastCaote", size=128),
    "pyramidkv": described("SnapKV", decode="grow"),
    "ada_snapkv": described("SnapKV", decode="grow"),
    "h2o": described("H2O"),
    "p2a_h2o": described("H2O"),
    "tova": described("Tova"),
    "streamingllm": described("Streaming"),
    "cake": described("Cake"),
    "kvec": described("KVec", decode="grow"),
    "roco": described("RoCo"),
}
"""Twelve: five of one family, two of another, five alone."""


UNLESS_GIVEN = ("likelihood", "measures", "kept_heads")


def sample(index: int, score: float | None, held: int = 2**20, **metadata: Any) -> Sample:
    """One example, right or wrong; `score` None: it failed."""
    one = Sample(
        index,
        f"{index:064d}",
        100,
        ["x"],
        metadata,
        output="x",
        score=score,
        kept_tokens=[[10, 20]],
        cache_bytes=held,
        peak_bytes=held,
        full_cache_bytes=2**24,
        generated_tokens=4,
        prefill_seconds=0.5,
        decode_seconds=0.25,
    )
    return failed(one) if score is None else one


def answered(index: int, score: float, output: str = "x", prompt: str = "", **metadata: Any) -> Sample:
    """One example: a right or wrong answer, and bytes held of 64 tokens in each of two layers' two heads."""
    one = replace(sample(index, score, **metadata), output=output, kept_tokens=[[60, 68], [64, 64]], spare_bytes=0)
    one = replace(one, prompt_hash=prompt or one.prompt_hash, prompt_tokens=1000, references=["4711"], peak_bytes=2**21)
    return replace(one, decode_steps=4, prefill_seconds=None, decode_seconds=None)


def failed(one: Sample) -> Sample:
    """The example if it had broken its budget."""
    return Sample(
        one.index, one.prompt_hash, one.prompt_tokens, ["x"], one.metadata, error="BudgetError: one token too many"
    )


def read(index: int, nll: Sequence[float], block: int | None = 4, **fields: Any) -> Sample:
    """One text whose tokens were given: the first is not scored, the others cost so many nats."""
    likelihood = summary(torch.tensor(nll), 1, block, torch.tensor([[9, 8]]))
    one = sample(index, 1.0, 100)
    return replace(one, score=None, output=None, references=[], likelihood=likelihood, **fields)


def write_run(
    out: Path,
    policy: str,
    samples: Sequence[Sample],
    budget: int | float | None = 64,
    task: str = "niah",
    model: str = "pocket",
    parts: dict[str, Any] | None = None,
    task_fields: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **identity: Any,
) -> Path:
    """One finished run; its policy's parts are those of POLICIES, or none (the full cache), unless given."""
    parts = parts or POLICIES.get(policy) or described(None)
    folder = out / f"{policy}-{budget}-{task}-{len(list(out.glob('*'))) if out.exists() else 0}"
    folder.mkdir(parents=True)
    lines = ({k: v for k, v in asdict(one).items() if k not in UNLESS_GIVEN or v} for one in samples)
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    about = {"model": {"sha256": "abc"}, "dtype": "float32", "policy": parts, "budget": budget, "seed": 0}
    about |= {"task": {"name": task, **(task_fields or {})}, "generation": {"decoding": "greedy"}, **identity}
    naming = {"policy": policy, "model": model, "task": task, "changed": [], "reads": None}
    write_yaml(folder / "config.yaml", {"run_id": folder.name, "naming": naming, "identity": about})
    write_json(folder / "environment.json", {**ENVIRONMENT, **(environment or {})})
    write_metrics(folder, samples)
    write_summary(folder, samples)
    return folder


def write_sweep(out: Path, budgets: Sequence[int], n: int = 10, tasks: Sequence[str] = ("niah",)) -> None:
    """The full cache, all right, and all twelve policies at every budget: each some more right than the one before."""
    for task in tasks:
        write_run(out, "full", [sample(i, 1.0, 2**24) for i in range(n)], None, task)
        for rank, policy in enumerate(POLICIES):
            for place, budget in enumerate(budgets):
                right = min(n, rank // 2 + place)
                scores = [sample(i, float(i < right), 2**10 * budget * (1 + rank % 3)) for i in range(n)]
                write_run(out, policy, scores, budget, task)
