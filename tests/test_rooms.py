"""The rooms of the house: who may import whom is drawn in CONTRIBUTING, and that is how it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

LEAF = "kvbench.errors"
"""Imports nothing of ours, so that every room may import it."""
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvbench"


def modules() -> dict[str, Path]:
    """Every module of ours by its import name, each once."""
    found = {}
    for path in sorted(_walk(PACKAGE)):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Python files below a folder, through links too (rglob follows none)."""
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            yield from _walk(path)
        elif path.suffix == ".py":
            yield path


MODULES = modules()


def imported(name: str) -> set[str]:
    """Modules of ours that a module imports, anywhere in its code, for types alone too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found |= {module for module in named if module in MODULES and module not in (name, "kvbench")}
    return found


def room(module: str) -> str:
    """The folder a module stands in; the hall for those of the package itself, and for commands named as a room is."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() and parts[-1] != "__main__" else "hall"


def drawn() -> dict[str, set[str]]:
    """The arrows in CONTRIBUTING's picture."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (picture,) = re.findall(r"```rooms\n(.*?)```", text, re.DOTALL)
    lines = (line.split("->") for line in picture.splitlines() if line.strip())
    return {
        left.strip(): {name.strip() for name in "".join(right).split(",") if name.strip()} for left, *right in lines
    }


def test_every_room_is_drawn() -> None:
    assert set(drawn()) == {room(module) for module in MODULES} - {"hall", "conf"}


@pytest.mark.parametrize("name", sorted(drawn()))
def test_a_room_imports_only_the_rooms_its_arrows_point_to(name: str) -> None:
    arrows = drawn()[name]
    for module in MODULES:
        if room(module) == name:
            others = {other for other in imported(module) if other != LEAF and room(other) not in (name, *arrows)}
            assert not others, f"{module} imports {', '.join(sorted(others))}"


def test_the_leaf_that_every_room_may_import_imports_none() -> None:
    assert not imported(LEAF)


def test_no_import_goes_in_a_circle_not_even_for_types_or_inside_functions() -> None:
    order = TopologicalSorter({name: imported(name) for name in MODULES}).static_order()
    assert len(list(order)) == len(MODULES)


def test_the_picture_itself_has_no_circle() -> None:
    assert len(list(TopologicalSorter(drawn()).static_order())) == len(drawn())
