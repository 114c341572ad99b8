"""What commands write to a stream."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest

from kvbench.terminal import bars
from kvbench.terminal.console import write_what_can_be


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("ascii", b'"d2o" u -> x *?'),
        ("latin-1", '"d2o" ü -> × ·?'.encode("latin-1")),
        ("utf-8", "“d2o” ü → × ·語".encode()),
    ],
)
def test_what_an_encoding_lacks_is_written_in_letters_it_has(encoding: str, said: bytes) -> None:
    written = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(written, encoding=encoding)):
        write_what_can_be()
        sys.stdout.write("“d2o” ü → × ·語")
        sys.stdout.flush()
        assert written.getvalue() == said


def test_a_name_whose_bytes_are_no_text_comes_out_as_it_is() -> None:
    written = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(written, encoding="utf-8")):
        write_what_can_be()
        sys.stdout.write(os.fsdecode(b"results/\xff.csv"))
        sys.stdout.flush()
        assert written.getvalue() == b"results/\xff.csv"


def test_claims_are_printed_where_stdout_is_ascii() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.claims", "--paper", "d2o"], capture_output=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b'"D2O significantly outperforms other eviction-based methods"' in done.stdout


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
