"""Runs of a small model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kvbench.run.run import Run, build_run
from kvbench.run.run_config import run_config

SMALL = ("task.lengths=[300]", "task.depths=[0.0,0.5,1.0]", "task.repeats=1", "task.max_new_tokens=3")


def small_cell(out: Path, model: Path, policy: str = "streamingllm", budget: int = 40, *more: str) -> Run:
    """Three needles in 300 tokens."""
    fields = {key: yaml.safe_load(text) for key, _, text in (word.partition("=") for word in (*SMALL, *more))}
    task = fields.pop("task", "niah")
    cell = build_run(run_config(model, policy, task, out=str(out), budget=budget, **fields))
    return replace(cell, changed=())


HOW = {"prefill_seconds", "decode_seconds", "device_peak_bytes", "shared_prefill", "rows_in_flight"}
"""Fields of a sample that say how it was computed."""


def lines(run: Run) -> list[dict[str, Any]]:
    """What a run wrote."""
    return [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]


def results(run: Run) -> list[dict[str, Any]]:
    """What a run wrote, but for how it ran."""
    return [{k: v for k, v in line.items() if k not in HOW} for line in lines(run)]
