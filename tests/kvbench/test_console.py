"""What commands write to a stream."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.__main__ import main
from kvbench.report.table import _aligned, _narrow
from kvbench.terminal import progress


def test_without_a_terminal_a_line_a_minute_has_progress_and_remaining_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 59.0, 60.0, 119.0, 120.0))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress.meter("niah", None, 2, "tokens") as advance:
        advance(1)
        advance(1)
        advance(3, "4 rows", 10)
        advance(0)
    assert capsys.readouterr().err == (
        "kvbench: niah: 4 tokens\nkvbench: niah: 7 of 10 tokens (01:12 left, 4 rows)\n"  # 3 left, at 5 in 120 seconds
    )


def test_the_progress_of_texts_is_in_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A text of 60 tokens behind a prompt of 50: after the prompt, then after every call; the last is not fed."""
    (tmp_path / "text.txt").write_text("A word or two. " * 60)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    texts = [f"task.data_dir={tmp_path}", "task.length=60", "task.prompt_tokens=50"]
    assert main(["policy=full", "task=perplexity", f"out={tmp_path / 'runs'}", *texts]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "tokens (" in line]
    assert re.findall(r"(\d+) of (\d+) tokens \(\d+:\d\d left\)", "\n".join(lines)) == [
        (number, "60") for number in ("50", "59", "60")
    ]


def test_a_table_that_fits_has_the_lines_that_rich_prints() -> None:
    headings, left = ["policy", "score\n(95% CI)", "n"], [True, False, False]
    rows = [("full", "0.9\n(0.8-1.0)", "20"), ("模型", "-", "5"), ("snapkv", "0.5", "20")]
    ends = [False, True, False]
    assert _aligned(headings, rows, ends, left) == _narrow(headings, rows, ends, left, 10_000)
