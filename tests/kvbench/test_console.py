"""What commands write to a stream."""

import io
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest

from kvbench.terminal import bars
from kvbench.terminal.console import write_what_can_be


def test_for_what_an_encoding_lacks_a_question_mark_stands() -> None:
    written = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(written, encoding="ascii")):
        write_what_can_be()
        sys.stdout.write("“d2o” ≤ 1")
        sys.stdout.flush()
        assert written.getvalue() == b"?d2o? ? 1"


def test_without_a_terminal_a_line_a_minute_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 59.0, 60.0, 119.0, 120.0))
    monkeypatch.setattr(bars, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with bars.meter("niah", None, 2) as advance:
        advance(1)
        advance(1)
        advance(3, "4 rows", 10)
        advance(0)
    assert capsys.readouterr().err == "kvbench: niah: 4\nkvbench: niah: 7 of 10 (4 rows)\n"
