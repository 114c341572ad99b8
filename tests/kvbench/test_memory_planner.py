"""How many rows enter beside those in flight, worked by hand on devices of a few kilobytes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.engine.memory import MemoryPlanner, sequence_bytes
from kvbench.engine.run_writer import RunCallback, RunWriter
from kvbench.models import devices as device_memory
from kvbench.models.devices import DeviceMemory
from kvbench.models.prompt import Prompt
from kvbench.run.run import Run
from kvbench.tasks.task import Example
from kvbench.tools.diagnose import runs_of

TOKEN = 2 * 2 * 2 * 8 * 4  # bytes: keys and values, layers, KV heads, head dim, float32
PROMPT, NEW, BUDGET = 100, 20, 40

Devices = Callable[..., None]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """CUDA devices that answer with these bytes: nothing else of one is asked."""

    def there(*found: DeviceMemory) -> None:
        monkeypatch.setattr(device_memory, "_allocators", lambda: list(found))

    return there


@pytest.fixture
def runs(tiny_model: Path, tmp_path: Path) -> list[RunWriter]:
    """Six runs of full and six of snapkv, on a CUDA device."""
    cells: list[Run] = []
    for slug in ("full", "snapkv"):
        fields = [f"model={tiny_model}", f"policy={slug}", f"out={tmp_path}", "task=niah", f"budget={BUDGET}"]
        fields += ["device=cpu", *(["policy.scorer.window=6"] if slug == "snapkv" else [])]
        cells += [replace(cell, device=torch.device("cuda")) for cell in runs_of(fields)] * 6
    return [RunWriter(f"{number}", [cell], RunCallback()) for number, cell in enumerate(cells)]


@pytest.fixture
def prompt() -> Prompt:
    return Prompt(Example(0, "", ("",), NEW), torch.zeros(PROMPT, dtype=torch.int32), "0")


def test_a_sequence_holds_the_tokens_its_policy_keeps(runs: list[RunWriter], prompt: Prompt) -> None:
    assert sequence_bytes(runs[0].run, prompt) == (PROMPT + NEW) * TOKEN
    assert sequence_bytes(runs[6].run, prompt) == (BUDGET + NEW) * TOKEN, "snapkv grows while it decodes"


def test_rows_enter_until_four_fifths_of_the_free_memory_less_two_prompts_are_taken(
    devices: Devices, runs: list[RunWriter], prompt: Prompt
) -> None:
    beside = 2 * PROMPT * TOKEN  # what the prefill takes
    for rows in (1, 3, 5):
        needed = beside + rows * (PROMPT + NEW) * TOKEN
        devices(DeviceMemory(needed * 5 // 4 + 1, 0, 0))
        assert MemoryPlanner(None).fits([prompt], runs[:6], [], 0) == rows
        devices(DeviceMemory(needed * 5 // 4 - 5, 0, 0))
        assert MemoryPlanner(None).fits([prompt], runs[:6], [], 0) == max(1, rows - 1), "one may always try"
    devices(DeviceMemory((beside + 6 * (BUDGET + NEW) * TOKEN) * 5 // 4 + 1, 0, 0))
    assert MemoryPlanner(None).fits([prompt], runs[6:], [], 0) == 6
    assert MemoryPlanner(None).fits([prompt], runs[:6], [], 0) == 3, "60 tokens each are 6 x 60 = 3 x 120"


def test_a_prefill_that_took_more_than_expected_leaves_less_room_from_then_on(
    devices: Devices, runs: list[RunWriter], prompt: Prompt
) -> None:
    devices(DeviceMemory((2 * PROMPT + 5 * (PROMPT + NEW)) * TOKEN * 5 // 4 + 1, 0, 0))
    room = MemoryPlanner(None)
    room.measured(prompt, runs[0].run, 1 * PROMPT * TOKEN)
    assert room.fits([prompt], runs[:6], [], 0) == 5, "less than expected changes nothing"
    room.measured(prompt, runs[0].run, 2 * PROMPT * TOKEN + 2 * (PROMPT + NEW) * TOKEN)
    assert room.fits([prompt], runs[:6], [], 0) == 3


def test_a_row_that_held_more_than_expected_makes_its_run_expect_it(
    devices: Devices, runs: list[RunWriter], prompt: Prompt
) -> None:
    devices(DeviceMemory((2 * PROMPT + 4 * (PROMPT + NEW)) * TOKEN * 5 // 4 + 1, 0, 0))
    room = MemoryPlanner(None)
    assert room.fits([prompt], runs[:1] * 6, [], 0) == 4
    room.finished(runs[0], prompt, 2 * (PROMPT + NEW) * TOKEN)
    assert room.fits([prompt], runs[:1] * 6, [], 0) == 2
    assert room.fits([prompt], runs[1:6], [], 0) == 4, "another run does not know"


def test_a_device_that_ran_out_of_memory_gets_half_as_many_rows(
    devices: Devices, runs: list[RunWriter], prompt: Prompt
) -> None:
    devices(DeviceMemory(10**9, 0, 0))
    room = MemoryPlanner(None)
    assert room.fits([prompt], runs[:6], [], 0) == 6
    room.ran_out(5)
    assert room.fits([prompt], runs[:6], [], 0) == 2
