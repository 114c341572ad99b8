"""Parameters of tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few_fast(names: Iterable[str], fast: Collection[str], others: pytest.MarkDecorator) -> list[Any]:
    """Parameters of a test, of which only `fast` run in the fast suite; others: their mark `slow`."""
    names = list(names)
    assert set(fast) <= set(names)
    return [pytest.param(name, marks=() if name in fast else others) for name in names]
