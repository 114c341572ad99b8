"""What commands write to a stream."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from kvbench.__main__ import main
from kvbench.report.text_table import TextTable, frame_of, text
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


def test_a_table_that_is_too_wide_is_folded_and_loses_no_character() -> None:
    rows = [["full", "0.9 (0.8-1.0)", "20"], ["模型", "-", "5"], ["snapkv", "0.5", "20"]]
    table = TextTable(frame_of(["policy", "score (95% CI)", "n"], [*zip(*rows, strict=True)]), left=["policy"])
    lines = text(table).splitlines()
    assert lines == [
        "           score (95%",
        "policy            CI)   n",
        "-------------------------",
        "full    0.9 (0.8-1.0)  20",
        "模型                -   5",
        "snapkv            0.5  20",
    ]
    assert text(table, 25).splitlines() == lines
    for width in (24, 20, 16):
        folded = text(table, width).splitlines()
        assert max(map(cell_len, folded)) <= width
        assert letters(folded) == letters(lines)
    assert text(table, 21).splitlines()[4:6] == ["              0.9", "full    (0.8-1.0)  20"]


def letters(lines: list[str]) -> list[str]:
    """All characters of a table but its rule and white space, sorted."""
    return sorted("".join("".join(line.split()) for line in lines if set(line) != {"-"}))
