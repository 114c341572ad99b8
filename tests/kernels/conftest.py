"""Calls of a column-sum function, which the other statistics of attention take."""

import pytest
from column_cases import CASES


@pytest.fixture(scope="session")
def cases() -> dict[str, dict[str, object]]:
    """The arguments of every case, by its name."""
    return {name: case.draw(seed) for seed, (name, case) in enumerate(CASES.items())}
