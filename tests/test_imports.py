"""Packages import each other only as the table in CONTRIBUTING.md allows, and never in a cycle."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

LEAF = "kvbench.errors"
"""Imports nothing of ours, so that every package may import it."""
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


@cache
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


def package(module: str) -> str:
    """The package of a module; `commands` for the modules of kvbench/ itself and every __main__.py."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() and parts[-1] != "__main__" else "commands"


def allowed() -> dict[str, set[str]]:
    """The table in CONTRIBUTING.md: package -> packages it may import."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"```imports\n(.*?)```", text, re.DOTALL)
    lines = (line.split("->") for line in table.splitlines() if line.strip())
    return {
        left.strip(): {name.strip() for name in "".join(right).split(",") if name.strip()} for left, *right in lines
    }


def test_every_package_is_in_the_table() -> None:
    assert set(allowed()) == {package(module) for module in MODULES} - {"commands", "conf"}


@pytest.mark.parametrize("name", sorted(allowed()))
def test_imports_between_packages_follow_the_table(name: str) -> None:
    arrows = allowed()[name]
    for module in MODULES:
        if package(module) == name:
            others = {other for other in imported(module) if other != LEAF and package(other) not in (name, *arrows)}
            assert not others, f"{module} imports {', '.join(sorted(others))}"


CORE = ("cache", "sequence", "eviction", "attention", "budgets", "layer")
EXTRAS = ("cascade", "inputs", "latent", "measured", "pre_passes", "recurrent", "shared")


@pytest.mark.parametrize("name", CORE)
def test_the_path_of_a_token_imports_no_extra(name: str) -> None:
    assert not imported(f"kvbench.cache.{name}") & {f"kvbench.cache.{extra}" for extra in EXTRAS}


def test_errors_imports_nothing() -> None:
    assert not imported(LEAF)


def test_no_import_cycle_even_for_types_or_inside_functions() -> None:
    order = TopologicalSorter({name: imported(name) for name in MODULES}).static_order()
    assert len(list(order)) == len(MODULES)


def test_the_table_has_no_cycle() -> None:
    assert len(list(TopologicalSorter(allowed()).static_order())) == len(allowed())
