"""Triton kernels interpreted on the CPU, in one process beside the tests: Triton reads TRITON_INTERPRET on import.

Memory that nobody wrote is full of NaN (of the largest number, where it holds integers): what a kernel forgets shows.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from parameters import few_fast

NUMPY_AND_OLD_TRITON = "only 0-dimensional arrays can be converted to Python scalars"
SECONDS = 600  # that a call may take
ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


class Interpreter:
    """A process that interprets kernels; it starts with the first call and lives until `close`."""

    def __init__(self) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _poison)

    def __call__(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """What a function of an importable module gives there, from copies of the arguments; its errors are raised."""
        with _environment():
            answer = self._process.submit(_answer, _packed((function, arguments)))
        try:
            return torch.load(io.BytesIO(answer.result(SECONDS)), weights_only=False)
        except Exception as error:
            if NUMPY_AND_OLD_TRITON in f"{error} {error.__cause__}":
                pytest.skip("the interpreter of this Triton cannot loop with this numpy")
            raise

    def close(self) -> None:
        self._process.shutdown()


def mostly_slow(names: Iterable[str], fast: Collection[str]) -> list[Any]:
    """Parameters of a test, of which only a few run in the fast suite: the interpreter takes its time."""
    return few_fast(names, fast, pytest.mark.slow("interprets kernels"))


@contextmanager
def _environment() -> Iterator[None]:
    """What the process inherits if it starts now."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _packed(what: object) -> bytes:
    """Tensors and all else as bytes; views stay views of one memory."""
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def _poison() -> None:
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")  # without the import of torch's compiler, a second
    torch.utils.deterministic.fill_uninitialized_memory = True


def _answer(call: bytes) -> bytes:
    function, arguments = torch.load(io.BytesIO(call), weights_only=False)
    return _packed(function(**arguments))
