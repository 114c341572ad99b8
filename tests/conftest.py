"""Makes tests/support importable: tiny models and the slow oracle, shared by several folders of tests."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "support"))
torch.set_num_threads(1)  # the models of these tests are tiny: more threads only get in each other's way
settings.register_profile("any machine", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # how long an example takes says how busy the machine is

from kernel_interpreted import Interpreter  # noqa: E402 - found in tests/support


def pytest_collection_finish() -> None:
    """Imported modules and collected tests live to the end: Python does not look for garbage among them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules report what lives on at the end of the process


def pytest_runtest_logfinish() -> None:
    """A worker of pytest-xdist that lost its GPU ends: another takes its place, where all its tests would fail."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # every call fails after an illegal access to memory
        sys.stderr.write(f"{error}\n")
        os._exit(1)


@pytest.fixture(autouse=True)
def _as_if_alone() -> Iterator[None]:
    """No test draws, logs or reads variables otherwise because of those before it: commands run in this process."""
    torch.default_generator.manual_seed(0)
    levels, before = {log: log.level for log in (logging.root, logging.getLogger("kvbench"))}, dict(os.environ)
    folders = [*sys.path]
    yield
    sys.path[:] = folders  # without folders of modules of the user
    for log, level in levels.items():
        if log.level != level:  # setting it asks every logger
            log.setLevel(level)
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def model() -> Any:
    """A tiny random Llama that attends through kvbench."""
    from kv_models import tiny

    from kvbench.cache.hook import prepare  # here: the process that starts the others of pytest-xdist needs no model

    return prepare(tiny())


@pytest.fixture(scope="session")
def interpret() -> Iterator[Interpreter]:
    """The process in which Triton interprets: `interpret(launcher, **arguments)` is what the launcher gives there."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
