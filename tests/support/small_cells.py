"""Cells of a small model, as the command line would build them, without the sweeper's composing one by one."""

from __future__ import annotations

from pathlib import Path

from kvbench.config.overrides import check
from kvbench.identity.cell import Cell, build_cell

SMALL = ("task.lengths=[300]", "task.depths=[0.0,0.5,1.0]", "task.repeats=1", "task.max_new_tokens=3")


def small_cell(out: Path, model: Path, policy: str = "streamingllm", budget: int = 40, *more: str) -> Cell:
    """Three needles in 300 tokens."""
    asked = check([f"model={model}", f"policy={policy}", f"budget={budget}", f"out={out}", *SMALL, *more])
    return build_cell(asked.first.config, policy, "local")
