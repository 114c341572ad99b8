"""A digest of the code that decides an outcome, so that results of other code are never taken for those of this one.

What counts is what the parsed code does: comments, docstrings and layout do not change the digest, nor does moving a
definition to another file. Only modules that a run can reach are read: the table's code is not, and a scorer's is only
where a policy uses it.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def code_digest(roots: Iterable[str]) -> str:
    """The first 16 digits of a sha256 over every definition in the modules `roots` and in all they import.

    Modules of other packages than their importer's count by their versions, which are recorded beside a run.
    """
    return _digest(frozenset(roots))


@cache  # the cells of a sweep are made of the same few parts
def _digest(roots: frozenset[str]) -> str:
    definitions = set[str]()
    for name in _reached(roots):
        definitions |= _definitions(name)
    return hashlib.sha256("\n".join(sorted(definitions)).encode()).hexdigest()[:16]


def _reached(roots: Iterable[str]) -> set[str]:
    """The modules `roots` and all of the same packages that they import, directly or not."""
    waiting, found = list(roots), set[str]()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(_imported(name))
    return found


@cache
def _imported(name: str) -> frozenset[str]:
    """Modules of its own package that a module imports, wherever in its code."""
    tree, package = _tree(name), name.partition(".")[0]
    if tree is None:
        return frozenset()
    named = [module for statement in _statements(tree.body) for module in _named(statement, name)]
    return frozenset(module for module in named if module.partition(".")[0] == package and _source(module))


def _statements(block: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements of a block and all inside them; expressions, most of a tree, hold none."""
    for statement in block:
        yield statement
        for inner in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from _statements(getattr(statement, inner, ()))


def _named(node: ast.AST, importer: str) -> Iterator[str]:
    """Whatever a statement may import as a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = importer.split(".")[: -node.level]
            base = ".".join([*parents, base] if base else parents)
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def _definitions(name: str) -> frozenset[str]:
    """Every top-level statement of a module but its imports and docstring, as text that only the code decides."""
    tree = _tree(name)
    if tree is None:
        return frozenset({name})
    statements = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return frozenset(_text(node) for node in statements if not _is_docstring(node))


@cache
def _tree(name: str) -> ast.Module | None:
    """The parsed source of a module; None where it has none."""
    source = _source(name)
    return None if source is None else ast.parse(source.read_bytes())


@cache
def _source(name: str) -> Path | None:
    """The file a module is written in. A script that was started stands under `__main__`."""
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if origin is None:
        try:
            spec = find_spec(name)
        except (ImportError, AttributeError, ValueError):  # `from module import function` names no module
            return None
        origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _text(node: object) -> str:
    """A node with all that is in it, without places in the file; fields that only some Pythons have are empty here."""
    if isinstance(node, ast.AST):
        fields = []  # a loop, for this is asked of 100,000 nodes: half the time of generators
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != []:
                fields.append(f"{name}={_text(value)}")
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join([_text(part) for part in node if not _is_docstring(part)])}]"
    return repr(node)
