"""Parameters of tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few_fast(names: Iterable[str], fast: Collection[str], cost: str) -> list[Any]:
    """Parameters of a test, of which only `fast` run in the fast suite; cost: of the others."""
    names = list(names)
    assert set(fast) <= set(names)
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow(cost)) for name in names]
