"""Digests of a run's identity, code and data: a run never mixes results of different ones."""

from __future__ import annotations

import ast
import gc
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from kvbench import __version__
from kvbench.errors import UsageError
from kvbench.models.gguf import version_of
from kvbench.models.user_cache import user_cache
from kvbench.results.files import digest_of as digest_of

FOLDERS = ("policies", "kernels", "tasks", "cache", "engine", "models")
"""The folders of the package with code that computes and scores."""
_THIS = Path(__file__)


def with_data(task: Any) -> Any:  # noqa: ANN401 - a described task
    """A described task, in which `data_dir` is the digest of the files there: equal files are equal data."""
    if isinstance(task, list):
        return [with_data(value) for value in task]
    if not isinstance(task, Mapping):
        return task
    return {k: data_digest(v) if k == "data_dir" and v else with_data(v) for k, v in task.items()}


def code_digest(described: object) -> str:
    """The first 16 digits of a sha256 over the package's version and the parsed source of `FOLDERS`.

    described: a description of parts; the modules of their classes in other packages count as well.
    """
    return _code_digest(frozenset(modules_of(described)))


@cache
def _code_digest(modules: frozenset[str]) -> str:
    files = [path for path in map(_file, sorted(modules)) if path is not None]
    own = _own_code()
    return (hashlib.sha256("".join([own, *map(_source, files)]).encode()).hexdigest() if files else own)[:16]


@cache
def _own_code() -> str:
    """The digest of the package's version and code, in hexadecimal.

    Parsing takes seconds, so the digest of the newest code is stored in the user's cache, by the bytes of its files.
    """
    package = Path(__file__).resolve().parents[1]
    files = [path for name in FOLDERS for path in sorted((package / name).resolve().rglob("*.py"))]
    read = [hashlib.sha256(path.read_bytes()).digest() for path in (_THIS, *files)]
    state = hashlib.sha256(f"{sys.version_info[:2]} {__version__}".encode() + b"".join(read)).hexdigest()
    stored = user_cache("code") / hashlib.sha256(str(package).encode()).hexdigest()[:16]
    with suppress(OSError, UnicodeDecodeError):
        known, _, digest = stored.read_text().partition(" ")
        if known == state and re.fullmatch("[0-9a-f]{64}", digest):
            return digest
    gc.disable()  # a syntax tree has 100,000s of objects, none of which is garbage yet: half the time
    try:
        digest = hashlib.sha256((__version__ + "".join(map(_source, files))).encode()).hexdigest()
    finally:
        gc.enable()
    with suppress(OSError):  # nothing is stored where nothing can be written
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(f"{state} {digest}")
    return digest


def _source(path: Path) -> str:
    """The code of a file without comments, docstrings and layout."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return re.sub(r"(, )?\w+=\[\]", "", ast.dump(tree))  # empty fields depend on the version of Python


def modules_of(described: object) -> Iterator[str]:
    """The modules of all classes of other packages in a described part."""
    values: Iterable[object] = described if isinstance(described, list) else ()
    if isinstance(described, Mapping):
        values = described.values()
        module = str(described.get("class", "kvbench.")).rpartition(".")[0]
        yield from () if module.startswith("kvbench") else (module,)
    for value in values:
        yield from modules_of(value)


def check_files(described: object) -> None:
    """Raise UsageError if a part's class has no file, as in a notebook: changes of its code would not be noticed."""
    for module in modules_of(described):
        if _file(module) is None:
            raise UsageError(f"the module {module} of a part has no file: move it to one, or leave out= out")


def _file(name: str) -> Path | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file) if file is not None and file.endswith(".py") else None


def data_digest(path: str) -> str:
    """The digest of a file, or of all files in a folder except hidden files and results of kvbench."""
    root = Path(os.path.expanduser(path))
    files = [root] if root.is_file() else [file for file in sorted(root.rglob("*")) if file.is_file()]
    runs = {file.parent for file in files if file.name == "environment.json" and file.with_name("config.yaml").exists()}
    data, written = [], ("sweep.yaml", "multirun.yaml")
    for file in files:
        name = "" if file == root else str(file.relative_to(root))
        if not name.startswith(".") and "/." not in name and name not in written and file.parent not in runs:
            data.append((file, name, *version_of(file)))
    return _data_digest(tuple(data))


@lru_cache(maxsize=32)  # the runs of a sweep share their tasks
def _data_digest(files: tuple[tuple[Any, ...], ...]) -> str:
    digest = hashlib.sha256()
    for file, name, *_ in files:
        with file.open("rb") as stream:
            digest.update(name.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
    return f"sha256:{digest.hexdigest()[:16]}"
