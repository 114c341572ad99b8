"""Finished runs to draw; every picture in the house style."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from plotted_runs import sample, write_run, write_sweep

from kvbench.report.figures import panels, style
from kvbench.results.result import Result

BUDGETS = (64, 128, 256, 512, 1024, 2048)


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sweep")
    write_sweep(out, BUDGETS)
    return out


@pytest.fixture(scope="session")
def cells(sweep: Path) -> list[Result]:
    return panels.read(sweep)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies and the full cache at two budgets."""
    out = tmp_path_factory.mktemp("small")
    write_run(out, "full", [sample(i, 1.0, 2**24) for i in range(4)], None)
    for policy in ("cake", "tova"):
        for budget in (64, 128):
            write_run(out, policy, [sample(i, float(i < budget // 64), 2**10 * budget) for i in range(4)], budget)
    return out


@pytest.fixture(autouse=True)
def _styled() -> Iterator[None]:
    with style.house_style():
        yield
