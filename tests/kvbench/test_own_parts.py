"""Parts that no file of this repository knows: a module and a folder of configurations of one's own are enough."""

import sys
from pathlib import Path

import pytest

from kvbench import make_policy
from kvbench.cli import main
from kvbench.sweep import main as sweep

PARTS = '''
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.stores.dense import Dense
from kvbench.policies.values.caote import Caote


@dataclass(frozen=True)
class Oldest(Scorer):
    """Keep the oldest tokens, every `stride`-th position first."""

    stride: int = 1

    def score(self, observation, state):
        return -(observation.positions % self.stride + observation.positions * 1e-3).float()


@dataclass(frozen=True)
class Shelf(Dense):
    slug_letters: ClassVar[Mapping[str, str]] = {"w": "width", "s": "shares", "at": "places"}

    width: int = 4
    shares: float = 0.5
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Half(Caote):
    pass
'''
FILES = {
    "policy/oldest.yaml": """
        _target_: kvbench.policies.policy.Policy
        scorer: {_target_: own_parts.Oldest}
        """,
    "policy/oldest_by_3.yaml": """
        defaults: [oldest, _self_]
        scorer: {stride: 3}
        """,
    "policy/shelf.yaml": """
        _target_: kvbench.policies.policy.Policy
        store: {_target_: own_parts.Shelf}
        """,
    "wrapper/half.yaml": "value: {_target_: own_parts.Half}",
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for --config-dir."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path / "code")
    for name, text in FILES.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("\n        ", "\n"))
    return tmp_path / "conf"


def test_a_wrapper_and_a_store_of_ones_own_are_part_of_names(own: Path) -> None:
    plain = make_policy("oldest", 64, config_dir=own)
    assert make_policy("oldest_by_3", 64, config_dir=own).scorer == type(plain.scorer)(stride=3)
    wrapped = make_policy("half_oldest_by_3_shelf_w8_s0.25_at0-2", 64, config_dir=own)
    assert type(wrapped.value).__name__ == "Half"
    assert (wrapped.store.width, wrapped.store.shares, wrapped.store.places) == (8, 0.25, [0, 2])
    assert wrapped.schedule.decode == "evict", "a store changes no schedule"
    assert type(make_policy("half_tova", 64, config_dir=own).value).__name__ == "Half"
    assert type(make_policy("caote_oldest", 64, config_dir=own).value).__name__ == "Caote"
    assert make_policy("tova_shelf", 64, config_dir=own).store.width == 4
    with pytest.raises(ValueError, match=r"shelf has no setting x3 \(allowed: w... \(width\), s"):
        make_policy("shelf_x3", config_dir=own)


def test_a_sweep_is_resumed_from_another_folder_with_parts_that_lie_beside_its_command(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    (first / "conf" / "policy").mkdir(parents=True)
    other.mkdir()
    (first / "beside.py").write_text(PARTS)
    oldest = "defaults: [tova]\nscorer: {_target_: beside.Oldest}\n"
    (first / "conf" / "policy" / "oldest.yaml").write_text(oldest)
    small = ("task.lengths=[300]", "task.depths=[0.5]", "task.repeats=1", "task.max_new_tokens=2")
    monkeypatch.setattr(sys, "path", [str(first), *sys.path])  # as `python -m` has it
    monkeypatch.chdir(first)
    assert (
        main(["-m", "--config-dir", "conf", f"model={tiny_model}", "policy=oldest", "budget=40", "out=runs", *small])
        == 0
    )
    (metrics,) = first.glob("runs/*/metrics.json")
    metrics.unlink()
    monkeypatch.delitem(sys.modules, "beside")
    monkeypatch.setattr(sys, "path", [str(other), *sys.path[1:]])
    monkeypatch.chdir(other)
    assert sweep(["resume", "../first/runs"]) == 0
    assert metrics.exists()
