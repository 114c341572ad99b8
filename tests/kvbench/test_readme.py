"""The README's commands do what the README shows."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from kvbench.config.tree import names, read

README = Path(__file__).parents[2] / "README.md"


def rows(text: str) -> list[list[str]]:
    """The rows of the results table in `text`, which has no seconds where rows share prefills and steps."""
    return [line.split() for line in text.splitlines() if " niah " in line]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["policy=caote_snapkv budget=256", "experiment=demo"])
def test_the_table_in_the_readme_is_what_the_command_prints(command: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "kvbench", *command.split()]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    shown = [
        block for block in re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL) if "kept/KV head" in block
    ]
    assert rows(done.stdout) in [rows(block) for block in shown]


def test_the_python_example_runs(tiny_model: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tiny_model)!r})
inputs = {{"input_ids": torch.arange(20)[None]}}
{example.replace("budget=2048", "budget=40, ")}
assert out.shape[1] > 20
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_make_help_lists_every_target() -> None:
    makefile = README.with_name("Makefile").read_text()
    done = subprocess.run(["make", "-s"], cwd=README.parent, capture_output=True, text=True, timeout=30)
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:")).split()[1:]
    assert [line.split()[1] for line in done.stdout.splitlines()] == phony


ROOMS = {
    "which tokens matter": ("scorers", "filters"),
    "does the value count": ("values",),
    "who gets how much": ("allocators",),
    "what becomes of the evicted": ("mergers",),
    "how the kept are stored": ("stores",),
}


def letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def test_the_table_of_parts_names_every_part_that_a_policy_of_ours_has() -> None:
    texts = [yaml.dump(read("policy", name)) for name in names("policy")]
    parts = {part for text in texts for part in re.findall(r"_target_: kvbench\.policies\.(\w+)\.(\w+)\.(\w+)", text)}
    rows = {row.split("|")[1].strip(): letters(row) for row in README.read_text().splitlines() if row.startswith("| ")}
    missing = []
    for room, module, part in sorted(parts):
        title = (import_module(f"kvbench.policies.{room}.{module}").__doc__ or "").partition(":")[0]
        (decision,) = (decision for decision, rooms in ROOMS.items() if room in rooms)
        if letters(part) not in rows[decision] and letters(title) not in rows[decision]:
            missing.append(f"{room}.{module}.{part}")
    assert len(parts) > 20
    assert missing == []
