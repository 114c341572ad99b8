"""One example that cannot be computed is a recorded failure with its sentence; the others are as they would be."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_cells import SMALL

from kvbench.cli import main

HUNGRY = '''
"""A scorer that needs more memory than there is, for a prompt of one length."""

from dataclasses import dataclass

import torch
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class Hungry(Scorer):
    """Keeps short keys."""

    at: int = 0
    real: bool = True

    def score(self, observation, state):
        if bool((observation.seen == self.at).any()):
            if self.real:
                torch.empty(1 << 50, dtype=torch.uint8)  # a thousand TiB
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\\nIf reserved but")
        return -observation.keys.float().norm(dim=-1)
'''


@pytest.fixture
def hungry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of configurations with the policy `hungry`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_conf/policy").mkdir(parents=True)
    (tmp_path / "my_conf/policy/hungry.yaml").write_text(
        "_target_: kvbench.policies.policy.Policy\nscorer: {_target_: hungry_scorers.Hungry}\n"
    )
    (tmp_path / "hungry_scorers.py").write_text(HUNGRY)
    yield tmp_path
    sys.modules.pop("hungry_scorers", None)


def samples(out: Path) -> list[dict[str, Any]]:
    (path,) = out.glob("*/samples.jsonl")
    return rows_of(path.parent)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def timeless(sample: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on how the example was scheduled; keys of one letter have one norm but for the rounding."""
    return {k: v for k, v in sample.items() if "seconds" not in k and k not in ("rows_in_flight", "kept_heads")}


@pytest.mark.parametrize(
    ("real", "sentence"),
    [
        ("true", "tried to allocate 1125899906842624 bytes"),
        pytest.param("false", "CUDA out of memory. Tried to allocate 20 GiB.", marks=pytest.mark.slow("more runs")),
    ],
)
def test_an_example_without_memory_is_recorded_and_the_others_go_on(
    real: str, sentence: str, hungry: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("task.lengths=[300,400,500]", "task.depths=[0.5]")
    command = ["--config-dir", "my_conf", f"model={tiny_model}", "policy=hungry", "budget=40", *SMALL, *lengths]
    assert main([*command, "out=whole"]) == 0
    whole = samples(hungry / "whole")
    middle = whole[1]["prompt_tokens"]
    assert len({sample["prompt_tokens"] for sample in whole}) == 3
    capsys.readouterr()
    broken = [*command, f"policy.scorer.at={middle}", f"policy.scorer.real={real}", "out=broken"]
    for _ in range(2):  # the second time from what lies on disk
        assert main(broken) == 1
        said = capsys.readouterr().err
        assert "1 of 3 examples" in said
        assert "Traceback" not in said
    first, failed, last = samples(hungry / "broken")
    assert sentence in failed["error"]
    assert "\n" not in failed["error"], "one sentence"
    assert (failed["score"], failed["output"], failed["kept_tokens"]) == (None, None, None)
    assert [timeless(first), timeless(last)] == [timeless(whole[0]), timeless(whole[2])]
    (metrics,) = [json.loads(path.read_text()) for path in (hungry / "broken").glob("*/metrics.json")]
    assert (metrics["n"], metrics["n_failed"], metrics["score"]) == (3, 1, None)
