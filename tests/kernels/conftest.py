"""Calls of a column-sum function, which the other statistics of attention take."""

import pytest
from column_cases import CASES


@pytest.fixture(params=list(CASES))
def name(request: pytest.FixtureRequest) -> str:
    """Every case in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def cases() -> dict[str, dict[str, object]]:
    """The arguments of every case, by its name."""
    return {name: case.draw(seed) for seed, (name, case) in enumerate(CASES.items())}
