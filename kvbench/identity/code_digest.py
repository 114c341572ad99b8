"""A digest of the code that decides an outcome, so that results of other code are never taken for those of this one.

What counts is what the parsed code does: comments, docstrings, messages and layout do not change the digest, nor does
moving a definition to another file; what an imported name stands for does. Only modules that a run can reach are read:
the table's code is not, and a scorer's is only where a policy uses it.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_OURS = __name__.partition(".")[0]
_ROOMS_APART = tuple(
    f"{_OURS}.{room}." for room in ("analysis", "config", "engine", "errors", "identity", "records", "terminal")
)
"""What chooses parts, arranges runs and tells of them: modules of these count only where they are roots."""
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")


def code_digest(roots: Iterable[str]) -> str:
    """The first 16 digits of a sha256 over every definition in the modules `roots` and in all they import.

    Modules of packages that are neither their importer's nor ours count by their versions, recorded beside a run.
    """
    return _digest(frozenset(roots))


@cache  # the cells of a sweep are made of the same few parts
def _digest(roots: frozenset[str]) -> str:
    meant = set[str]()
    for name in reached(roots):
        meant |= _definitions(name)
    return hashlib.sha256("\n".join(sorted(meant)).encode()).hexdigest()[:16]


def reached(roots: Iterable[str]) -> set[str]:
    """The modules `roots` and all that count of those they import, directly or not."""
    waiting, found = list(roots), set[str]()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(_imported(name))
    return found


@cache
def _imported(name: str) -> frozenset[str]:
    """Modules that count of those that a module imports, wherever in its code."""
    tree = _tree(name)
    if tree is None:
        return frozenset()
    named = {module for node in _statements(tree.body) for _, *either in _named(node, name) for module in either}
    return frozenset(module for module in named if _counts(module, name.partition(".")[0]) and _source(module))


def _counts(module: str, package: str) -> bool:
    """Whether the code of a module that a package imports is read."""
    near = module.partition(".")[0] in (_OURS, package)
    return near and not f"{module}.".startswith(_ROOMS_APART)


def _statements(block: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements of a block and all inside them; expressions, most of a tree, hold none."""
    for statement in block:
        yield statement
        for inner in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from _statements(getattr(statement, inner, ()))


def _named(node: ast.AST, importer: str) -> Iterator[tuple[str, str, str]]:
    """For every name that a statement imports: the name here, the module it is from, and its full name.

    Either may be the module that is imported; they are the same for `import module`.
    """
    if isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name, alias.name, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            source = _source(importer)
            inside = 1 if source is not None and source.name == "__init__.py" else 0
            parents = importer.split(".")
            parents = parents[: len(parents) - node.level + inside]
            base = ".".join([*parents, base] if base else parents)
        yield from ((alias.asname or alias.name, base, f"{base}.{alias.name}") for alias in node.names)


@cache
def _definitions(name: str) -> frozenset[str]:
    """Every top-level statement of a module but its docstring, as text that only the code decides.

    Of an import that is what each name stands for.
    """
    tree = _tree(name)
    if tree is None:
        return frozenset({name})
    texts, package = set[str](), name.partition(".")[0]
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            texts |= {f"{here}: {_meaning(full, package)}" for here, _, full in _named(node, name)}
        elif not _is_words(node):
            texts.add(_text(node))
    return frozenset(texts | _data(name))


def _data(name: str) -> set[str]:
    """Digests of the files of `tasks/data` that a module names: prompts and tables decide as code does."""
    source, tasks = _source(name), _source(f"{_OURS}.tasks")
    named = [] if source is None else re.findall(r'"(\w+\.json)"', source.read_text(encoding="utf-8"))
    files = [] if tasks is None else [tasks.with_name("data") / file for file in named]
    return {hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


@cache
def _meaning(full: str, package: str) -> str:
    """What a full name stands for: its definition, wherever that lies, where it is read; else the name itself."""
    module, _, name = full.rpartition(".")
    tree = _tree(module) if module and _counts(module, package) else None
    for node in [] if tree is None else tree.body:
        if name in _bound(node):
            return hashlib.sha256(_text(node).encode()).hexdigest()
        for here, _, further in _named(node, module):
            if here == name and further != full:
                return _meaning(further, package)
    return full


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


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


def _is_words(node: ast.AST) -> bool:
    """Whether a statement only tells: a docstring, or a line of the log."""
    if not isinstance(node, ast.Expr):
        return False
    called = getattr(node.value, "func", None)
    to_log = getattr(getattr(called, "value", None), "id", "") == "log" and getattr(called, "attr", "") in _LEVELS
    return to_log or _is_text(node.value)


def _is_text(node: object) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _makes_error(node: ast.AST) -> bool:
    called = getattr(node, "func", None)
    return str(getattr(called, "id", "") or getattr(called, "attr", "")).endswith("Error")


def _text(node: object, message: bool = False) -> str:
    """A node with all that is in it, without places in the file; fields that only some Pythons have are empty here.

    message: it is part of what an error is made of, whose texts are left out.
    """
    if isinstance(node, ast.AST):
        if message and _is_text(node):
            return "text"
        message = message or _makes_error(node)
        fields = []  # a loop, for this is asked of 100,000 nodes: half the time of generators
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != [] and not (name == "msg" and isinstance(node, ast.Assert)):
                fields.append(f"{name}={_text(value, message)}")
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join([_text(part, message) for part in node if not _is_words(part)])}]"
    return repr(node)


def modules_of(described: object) -> Iterator[str]:
    """The modules of all classes in a described part."""
    if isinstance(described, Mapping):
        if "class" in described:
            yield str(described["class"]).rpartition(".")[0]
        for value in described.values():
            yield from modules_of(value)
    elif isinstance(described, list):
        for value in described:
            yield from modules_of(value)
