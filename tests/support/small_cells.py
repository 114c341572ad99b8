"""Runs of a small model, and what they wrote."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kvbench.run.run import Run, build_run
from kvbench.run.run_config import run_config
from kvbench.tools.diagnose import runs_of

SMALL = ("task.lengths=[300]", "task.depths=[0.0,0.5,1.0]", "task.repeats=1", "task.max_new_tokens=3")


def small_cell(out: Path, model: Path, policy: str = "streamingllm", budget: int = 40, *more: str) -> Run:
    """Three needles in 300 tokens."""
    fields = {key: yaml.safe_load(text) for key, _, text in (word.partition("=") for word in (*SMALL, *more))}
    task = fields.pop("task", "niah")
    cell = build_run(run_config(model, policy, task, out=str(out), budget=budget, **fields))
    return replace(cell, changed=())


def cells_of(model: Path, out: Path, policies: str, *fields: str, rows: int | None = None) -> list[Run]:
    """Cells of several policies at 40 tokens, of two needles at each of three depths."""
    needles = ("task=niah", *SMALL[:2], "task.repeats=2", "task.max_new_tokens=6", "budget=40", "device=cpu")
    how = (f"engine.rows={'null' if rows is None else rows}", *fields)
    return list(runs_of([f"model={model}", f"policy={policies}", f"out={out}", *needles, *how]))


HOW = {"prefill_seconds", "decode_seconds", "device_peak_bytes", "shared_prefill", "rows_in_flight"}
"""Fields of a sample that say how it was computed."""


def lines(run: Run) -> list[dict[str, Any]]:
    """What a run wrote."""
    return read(run.folder / "samples.jsonl")


def read(file: Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def results(run: Run) -> list[dict[str, Any]]:
    """What a run wrote, but for how it ran."""
    return [{k: v for k, v in line.items() if k not in HOW} for line in lines(run)]


def samples(out: Path) -> dict[str, list[dict[str, Any]]]:
    """What every run of a folder wrote, but for how it ran."""
    files = sorted(out.glob("*/samples.jsonl"))
    return {file.parent.name: [{k: v for k, v in one.items() if k not in HOW} for one in read(file)] for file in files}


def only(out: Path) -> list[dict[str, Any]]:
    """What the only run of a folder wrote."""
    (found,) = samples(out).values()
    return found


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
