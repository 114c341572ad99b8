"""A digest of the code that decides results, so that results of other code are not taken for those of this code."""

from __future__ import annotations

import ast
import gc
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

from kvbench.errors import UsageError

FOLDERS = ("policies", "kernels", "tasks", "cache", "engine", "inference", "models")
"""The folders of the package whose code computes and scores."""


def code_digest(described: object) -> str:
    """The first 16 digits of a sha256 over the package's version and the parsed source of `FOLDERS`.

    described: a description of parts; the modules of its classes that belong to other packages count as well.
    """
    return _digest(frozenset(_modules(described)))


@cache
def _digest(modules: frozenset[str]) -> str:
    files = [path for path in map(_file, sorted(modules)) if path is not None]
    return hashlib.sha256("".join([_own(), *map(_source, files)]).encode()).hexdigest()[:16]


@cache
def _own() -> str:
    package = Path(__file__).resolve().parents[1]
    files = [path for name in FOLDERS for path in sorted((package / name).resolve().rglob("*.py"))]
    gc.disable()  # a tree has 100,000s of objects, and none of them is garbage yet: half the time
    try:
        return version("kvbench") + "".join(map(_source, files))
    finally:
        gc.enable()


def _source(path: Path) -> str:
    """What the code of a file does: no comments, no docstrings, no layout."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return re.sub(r"(, )?\w+=\[\]", "", ast.dump(tree))  # empty fields depend on the version of Python


def _modules(described: object) -> Iterator[str]:
    """The modules of all classes of other packages in a described part."""
    if isinstance(described, Mapping):
        module = str(described.get("class", "kvbench.")).rpartition(".")[0]
        yield from () if module.startswith("kvbench") else (module,)
    for value in (
        described.values() if isinstance(described, Mapping) else described if isinstance(described, list) else ()
    ):
        yield from _modules(value)


def check_files(described: object) -> None:
    """Raise UsageError if a part's class has no file, as in a notebook: changes of its code would go unnoticed."""
    for module in _modules(described):
        if _file(module) is None:
            raise UsageError(f"the module {module} of a part has no file: move it to one, or leave out= out")


def _file(name: str) -> Path | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file) if file is not None and file.endswith(".py") else None
