"""What commands write to a stream."""

from types import SimpleNamespace

import pytest

from kvbench.terminal import bars


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
