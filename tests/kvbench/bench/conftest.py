"""What every test of the benchmark has: a tiny model, and copies of small buffers."""

from pathlib import Path

import pytest
from bench_model import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a tiny model and no weights."""
    return tiny_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _no_long_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of a copy is measured on small buffers: these tests read no figure of it."""
    monkeypatch.setattr("kvbench.tools.bench.clock.COPIED", {"cpu": 2**20})
