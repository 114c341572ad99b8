"""What is imported is declared, and what only some tasks need is not needed by the others."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import kvbench
from kvbench.tasks.longbench.metrics import _words_zh
from kvbench.tasks.needlebench.data import gpt4_encoding
from kvbench.tasks.ruler.niah import punkt_sentences

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kvbench", "policies", "kernels", "tasks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BY_HAND = {"kvpress"}  # requires an older transformers, so `make install` installs it with --no-deps


def distributions(requirements: list[str]) -> set[str]:
    return {_canonical(re.split(r"[\s\[<>=;!~]", one)[0]) for one in requirements}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


CORE = distributions(PROJECT["dependencies"])
EXTRAS = {name: distributions(listed) for name, listed in PROJECT["optional-dependencies"].items()}


@cache
def _installed() -> dict[str, list[str]]:
    return dict(packages_distributions())


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Top-level names of the modules imported; relative imports are our own."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def foreign(names: Iterator[str]) -> set[str]:
    return {name for name in names if name != "kvbench" and name not in sys.stdlib_module_names} - BY_HAND


@cache
def sources() -> list[ast.Module]:
    return [ast.parse(path.read_bytes()) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def undeclared(names: set[str], declared: set[str]) -> list[str]:
    return sorted(
        name for name in names if not {_canonical(found) for found in _installed().get(name, [name])} & declared
    )


def test_every_import_of_another_package_is_declared() -> None:
    names = {name for tree in sources() for name in foreign(imports(ast.walk(tree)))}
    assert {"torch", "hydra", "yaml", "tqdm", "jieba"} <= names
    assert undeclared(names, CORE.union(*EXTRAS.values())) == []


def test_packages_of_extras_are_imported_only_inside_functions() -> None:
    names = {name for tree in sources() for name in foreign(imports(iter(tree.body)))}
    assert undeclared(names, CORE) == []


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("jieba", "longbench", partial(_words_zh, "\u4f60\u597d")),
        ("tiktoken", "needlebench", partial(gpt4_encoding, None)),
        ("nltk", "ruler", partial(punkt_sentences, "One. Two.")),
    ],
)
def test_a_task_without_its_extra_names_it(
    package: str, extra: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # how Python says that a module is not there
    with pytest.raises(
        ValueError, match=rf" needs {package}, which is not installed: pip install 'kvbench\[{extra}\]'$"
    ):
        use()


def test_the_citation_and_the_classifiers_are_those_of_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (kvbench.__version__, PROJECT["license"])
    assert cited["authors"] == PROJECT["authors"]
    least, beyond = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    named = re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["classifiers"]))
    assert [*map(int, named)] == [*range(int(least), int(beyond))]
