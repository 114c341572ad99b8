"""Calls of a column-sum function, which the other statistics of attention take; a table of compiled kernels."""

import pytest
from column_cases import CASES
from kernel_compiled import MADE, table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With -v: what the kernels compiled by this process came to."""
    if MADE and terminalreporter.verbosity >= 0:
        terminalreporter.section("kernels compiled")
        terminalreporter.write_line(table())


@pytest.fixture(params=list(CASES))
def name(request: pytest.FixtureRequest) -> str:
    """Every case in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def cases() -> dict[str, dict[str, object]]:
    """The arguments of every case, by its name."""
    return {name: case.draw(seed) for seed, (name, case) in enumerate(CASES.items())}
