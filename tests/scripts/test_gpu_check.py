"""The check of a new GPU, as far as it runs without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import gpu_check


def test_a_dry_run_measures_logits_and_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["2", "8", "--dry"]) == 0
    said = capsys.readouterr().out
    assert [line[0] for line in said.splitlines() if line[0].isdigit()] == ["2", "8"]
    assert "largest difference of a logit: " in said
    assert "4 bits over 16 bits: " in said
    assert "HOLD" not in said, "times of a dry run mean nothing"


@pytest.mark.slow("runs every measurement")
def test_a_dry_run_measures_everything() -> None:
    assert gpu_check.main(["--dry"]) == 0


@pytest.mark.parametrize(("value", "code"), [(0.99, 1), (1.0, 0)])
def test_a_bound_that_does_not_hold_is_a_failure(
    value: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(check: Any) -> gpu_check.Found:
        """A share."""
        return [("share", value, ">=", 1)]

    monkeypatch.setattr(gpu_check, "CHECKS", (measured,))
    assert gpu_check.main(["1"]) == code
    assert ("DOES NOT HOLD" in capsys.readouterr().out) == bool(code)
