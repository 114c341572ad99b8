"""Files are replaced as a whole: a full disk destroys no older file and leaves no part of a new one."""

import resource
import signal
from pathlib import Path

import pytest
from plotted_runs import sample, write_run

from kvbench.plot import main as plot
from kvbench.report.html.report import main as report
from kvbench.results.__main__ import main as results


@pytest.mark.parametrize("name", ["table.csv", "table.parquet", "table.md", "table.tex", "budget.svg", "report.html"])
def test_a_full_disk_keeps_the_older_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", "snapkv", [sample(0, 1.0)])
    (tmp_path / name).write_text("older")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit raises OSError instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        command = [str(tmp_path / "runs"), "-o", str(tmp_path / name)]
        main = {".svg": plot, ".html": report}.get(Path(name).suffix, lambda words: results(["collect", *words]))
        assert main(command) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert f"{name} cannot be written" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "older"
    assert {file.name for file in tmp_path.iterdir()} == {"runs", name}
