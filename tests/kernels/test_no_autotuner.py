"""Kernels run in a few written-down configurations: nothing in kernels/ tries some out on the user's time."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import kvbench.kernels

TRYING = re.compile(r"auto_?tun|do_bench|triton.testing", re.IGNORECASE)


def sources() -> dict[str, str]:
    """The text of every module in kernels/."""
    (folder,) = {str(path) for path in kvbench.kernels.__path__}
    found = [module.name for module in pkgutil.iter_modules([folder])]
    assert len(found) > 15
    return {name: Path(folder, f"{name}.py").read_text(encoding="utf-8") for name in found}


def tried_out(source: str) -> list[str]:
    """Names and words in a module's code that measure configurations against each other; its docstrings aside."""
    tree = ast.parse(source)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    words = (word for node in ast.walk(tree) if id(node) not in said for word in _words(node))
    return sorted({word for word in words if TRYING.search(word)})


def _words(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
            yield name
        case ast.alias(name=name, asname=other):
            yield from (name, other or "")
        case ast.ImportFrom(module=str(name)):
            yield name
        case ast.Constant(value=str(name)):
            yield name


def kernels_of(module: ModuleType) -> dict[str, object]:
    """Whatever Triton could launch in a module, by name."""
    runtime = pytest.importorskip("triton.runtime.jit", reason="Triton has wheels for Linux only")
    return {name: thing for name, thing in vars(module).items() if isinstance(thing, runtime.KernelInterface)}


@pytest.mark.parametrize("name", sources())
def test_no_module_names_what_tries_configurations_out(name: str) -> None:
    assert tried_out(sources()[name]) == []


@pytest.mark.parametrize(
    "planted",
    [
        "@triton.autotune(configs=[], key=[])\ndef kernel(): ...",
        "from triton import autotune as choose",
        "from triton.runtime.autotuner import Autotuner as Kernel",
        "import triton.testing as clock",
        "best = min(configs, key=lambda config: do_bench(config))",
        "fast = torch.compile(slow, mode='max-autotune')",
    ],
)
def test_an_autotuner_would_be_named(planted: str) -> None:
    assert tried_out(f'"""A few configurations, no autotuner."""\n{planted}\n') != []
    assert tried_out('"""A few configurations, no autotuner."""\n') == []


@pytest.mark.parametrize("name", sources())
def test_every_kernel_is_compiled_as_it_stands(name: str) -> None:
    """Triton wraps a kernel whose configurations it tries out, or makes from arguments, in an object of its own."""
    plain = ("JITFunction", "InterpretedFunction")
    kernels = kernels_of(importlib.import_module(f"kvbench.kernels.{name}"))
    assert {kernel for kernel, thing in kernels.items() if type(thing).__name__ not in plain} == set()


def test_a_kernel_under_an_autotuner_would_be_found() -> None:
    triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    module = ModuleType("planted")
    vars(module)["kernel"] = triton.runtime.autotuner.Autotuner.__new__(triton.runtime.autotuner.Autotuner)
    assert [type(thing).__name__ for thing in kernels_of(module).values()] == ["Autotuner"]
