"""Makes tests/support importable: tiny models and the slow oracle, shared by several folders of tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "support"))
torch.set_num_threads(1)  # the models of these tests are tiny: more threads only get in each other's way
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # how long an example takes says how busy the machine is

from kernel_interpreted import Interpreter  # noqa: E402 - found in tests/support


@pytest.fixture(scope="session")
def interpret() -> Iterator[Interpreter]:
    """The process in which Triton interprets: `interpret(launcher, **arguments)` is what the launcher gives there."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
