"""The README's commands do what the README shows."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from shown_outputs import outputs
from transformers import AutoModelForCausalLM

from kvbench.config.parts import build
from kvbench.config.presets import policy_config, scheduled

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def commands() -> list[list[str]]:
    """The commands of the README's blocks, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


SWEEPS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def example_sweeps() -> list[tuple[str, list[str]]]:
    """The example sweeps over several policies, and the demo: where each stands, and what it sets."""
    demo = yaml.safe_load((ROOT / "conf" / "experiment" / "demo.yaml").read_text())
    fields = {**demo, "policy": demo["hydra"]["sweeper"]["params"]["policy"]}
    found = [("demo", [f"{name}={fields[name]}" for name in ("policy", "schedule", "decode")])]
    for path in SWEEPS:
        lines = re.findall(r"kvbench (?:[^`\n]* )?-m [^`\n]*policy=\w+,[^`\n]*", path.read_text(encoding="utf-8"))
        found += [(path.name, shlex.split(line.partition(" # ")[0])) for line in lines]
    return found


@pytest.mark.parametrize(("where", "arguments"), example_sweeps())
def test_every_example_sweep_has_one_schedule_and_one_decoding_rule(where: str, arguments: list[str]) -> None:
    """Else its rows could not be compared with each other."""
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    assert "," not in given.get("block", "") + given.get("schedule", "") + given.get("decode", "")
    block = float(given["block"]) if "block" in given else None
    folders = [ROOT / "docs" / "examples" / "conf"]
    configs = [policy_config(name, folders) for name in given["policy"].split(",")]
    every = int(given["every"]) if "every" in given else None
    how = given.get("schedule"), block, given.get("decode"), every, given.get("protect")
    rules = {build(scheduled(config, *how)["schedule"]) for config in configs if config.get("scorer")}
    assert len(rules) <= 1, f"{where}: {given['policy']} evict at other moments"


@pytest.mark.slow("runs commands on the pocket model")
@pytest.mark.parametrize("block", outputs().shown(), ids=lambda block: block.splitlines()[0])
def test_the_output_in_the_readme_is_that_of_the_command(block: str, tmp_path: Path) -> None:
    """Ids of runs included: `python scripts/readme_outputs.py` writes them anew."""
    (command,) = outputs().commands(block)
    assert f"$ {command}\n{outputs().printed(command, tmp_path)}" == block


@pytest.mark.slow("runs commands on the pocket model")
def test_the_commands_of_the_readme_run_one_after_the_other(tmp_path: Path) -> None:
    """With fewer and shorter examples."""
    (tmp_path / "report").mkdir()
    for arguments in commands():
        short = ["limit=1", "task.lengths=[300]", "task.depths=[0.5]"] if arguments[:2] == ["kvbench", "-m"] else []
        given = [re.sub(r"^limit=\d+$", "limit=1", argument) for argument in arguments]
        words = outputs().in_python([*given, *short])
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
    made = {path.name for path in tmp_path.rglob("*") if path.suffix in (".svg", ".tex", ".html")}
    assert {"report.html", "table.tex", "bytes.svg", "budget.svg"} <= made


def test_the_python_example_runs(tiny_model: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    known = {"model": model, "inputs": {"input_ids": torch.arange(20)[None]}}
    exec(example.replace("budget=2048", "budget=40, "), known)
    assert known["out"].shape[1] > 20
