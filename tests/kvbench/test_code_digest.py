"""The identity of a run follows the code that computes it, and nothing else of the code."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.policies.scorers.snapkv import SnapKV
from kvbench.runs import code_digest as module
from kvbench.runs.cell import COMPUTES, describe, modules_of
from kvbench.runs.code_digest import code_digest

SCORER = '''
"""Scores."""

from {name}.helper import weight


class Mine:
    """Keeps the heavy."""

    def score(self, x: int) -> int:
        """A number."""
        return weight(x) + 1  # why
'''
HELPER = """
def weight(x: int) -> int:
    return 2 * x
"""
Digest = Callable[..., str]
number = itertools.count()


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Digest:
    """The digest of a package of these files (without .py), rooted in its module `scorer`; a new package every time."""
    monkeypatch.syspath_prepend(tmp_path)

    def of(root: str = "scorer", **files: str) -> str:
        name = f"parts_{next(number)}"
        (tmp_path / name).mkdir()
        for file, text in {"__init__": "", "helper": HELPER, "scorer": SCORER, **files}.items():
            (tmp_path / name / f"{file}.py").write_text(text.replace("{name}", name))
        return code_digest([f"{name}.{root}"])

    return of


def test_comments_docstrings_and_layout_do_not_count(digest: Digest) -> None:
    changed = SCORER.replace("  # why", "").replace('"""Scores."""', '"""What it scores."""\n# a comment')
    changed = changed.replace('        """A number."""\n', "").replace(
        "weight(x) + 1", "(\n            weight(x) + 1\n        )"
    )
    assert changed != SCORER
    assert digest(scorer=changed) == digest()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [("scorer", "+ 1", "+ 2"), ("helper", "2 * x", "3 * x"), ("scorer", "def score", "def rank")],
)
def test_what_the_code_does_counts_in_a_module_and_in_those_it_imports(
    digest: Digest, file: str, old: str, new: str
) -> None:
    text = {"scorer": SCORER, "helper": HELPER}[file]
    assert digest(**{file: text.replace(old, new)}) != digest()


def test_what_no_module_of_the_run_imports_does_not_count(digest: Digest) -> None:
    assert digest(table="WIDTH = 80") == digest(table="WIDTH = 100") == digest()


def test_a_definition_may_move_to_another_file(digest: Digest) -> None:
    moved = digest(helper="from {name}.weights import weight\n", weights=HELPER)
    assert moved == digest()


@pytest.mark.parametrize(
    "place",
    [
        "def late():\n    {}",
        "class Late:\n    def late(self):\n        {}",
        "try:\n    import nothing_of_the_kind\nexcept ImportError:\n    {}",
        "try:\n    pass\nfinally:\n    {}",
        "if 1 > 2:\n    pass\nelse:\n    {}",
        "with memoryview(b''):\n    {}",
        "while False:\n    pass\nelse:\n    {}",
        "match 1:\n    case 2:\n        {}",
    ],
)
def test_imports_are_followed_wherever_they_stand(digest: Digest, place: str) -> None:
    lazy = place.format("from . import extra")
    assert digest(helper=HELPER + lazy, extra="N = 1") != digest(helper=HELPER + lazy, extra="N = 2")


def test_a_run_of_snapkv_reads_its_scorer_and_the_cache_but_no_other_scorer_and_no_table() -> None:
    reached = module._reached([*COMPUTES, *modules_of(describe(SnapKV()))])
    assert {"kvbench.policies.scorers.snapkv", "kvbench.cache.layer", "kvbench.kernels.attention_rows"} <= reached
    assert (
        not {"kvbench.policies.scorers.cake", "kvbench.report.table", "kvbench.report.collect", "kvbench.cli"} & reached
    )


def test_two_classes_of_the_same_name_are_two_policies() -> None:
    assert describe(SnapKV())["class"] == "kvbench.policies.scorers.snapkv.SnapKV"
