"""What is imported is declared, and what only some tasks need is not needed by the others."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import pytest
import yaml

import kvbench
from kvbench.cli import main
from kvbench.plot import cli as plot
from kvbench.report.html.report import html_report
from kvbench.report.wandb_logger import WandbLogger
from kvbench.results import session, summary
from kvbench.sweeps.jobs import Launcher
from kvbench.tasks.lm_eval.task import LmEval
from kvbench.tasks.longbench.metrics import _words_zh
from kvbench.tasks.needlebench.data import gpt4_encoding

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
def sources() -> list[tuple[str, ast.Module]]:
    """The path and the code of every file."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_bytes())) for path in files]


def undeclared(names: set[str], declared: set[str]) -> list[str]:
    return sorted(
        name for name in names if not {_canonical(found) for found in _installed().get(name, [name])} & declared
    )


def test_every_import_of_another_package_is_declared() -> None:
    names = {name for _, tree in sources() for name in foreign(imports(ast.walk(tree)))}
    assert {"torch", "hydra", "yaml", "tqdm", "jieba"} <= names
    assert undeclared(names, CORE.union(*EXTRAS.values())) == []


BELONG = {
    "kvbench/report/figures": "report",
    "kvbench/tools/diagnostics": "report",
    "kvbench/tools/harness_model.py": "lm-eval",
}
"""Places that are imported only inside functions, and the extra that they need as a whole."""


def test_packages_of_extras_are_imported_only_inside_functions() -> None:
    for path, tree in sources():
        extra = next((extra for place, extra in BELONG.items() if path.startswith(place)), None)
        assert undeclared(foreign(imports(iter(tree.body))), CORE | EXTRAS.get(str(extra), set())) == [], path


def test_modules_that_need_an_extra_are_imported_only_inside_functions_of_others() -> None:
    """html/tables and those that import it are imported inside `html_report`."""
    report = {"kvbench/report/html/tables.py", "kvbench/report/html/caveats.py", "kvbench/report/html/examples.py"}
    names = tuple(place.removesuffix(".py").replace("/", ".") for place in (*BELONG, *report))
    for path, tree in sources():
        if not path.startswith((*BELONG, *report)):
            modules = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
            assert [one for one in modules if one.startswith(names)] == [], path


def _plot() -> object:
    return plot.callback(Path("runs"), Path("made"), None, ())  # type: ignore[misc]


def _report() -> object:
    return html_report([], Path())


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("jieba", "longbench", partial(_words_zh, "\u4f60\u597d")),
        ("tiktoken", "needlebench", partial(gpt4_encoding, None)),
        ("lm_eval", "lm-eval", partial(main, ["lm-eval", "ls"])),
        ("matplotlib", "report", _plot),
        ("matplotlib", "report", partial(main, ["diagnose", "coverage"])),
        ("itables", "report", _report),
        ("submitit", "slurm", partial(Launcher, cluster="slurm")),
        ("wandb", "wandb", partial(WandbLogger().watch, None)),
    ],
)
def test_what_needs_an_extra_names_it(
    package: str,
    extra: str,
    use: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [*sys.modules]:
        if name.startswith(("kvbench.report.figures", "kvbench.report.html.", "kvbench.tools.diagnostics")):
            monkeypatch.delitem(sys.modules, name)  # they would not be imported again
        elif name == package or name.startswith(f"{package}."):
            monkeypatch.setitem(sys.modules, name, None)  # how Python says that a module is not there
    monkeypatch.setitem(sys.modules, package, None)
    try:
        use()
        said = capsys.readouterr().err.strip()
    except ValueError as error:
        said = str(error)
    assert re.search(rf" needs {package}, which is not installed: pip install 'kvbench\[{extra}\]'$", said), said


def test_a_task_of_lm_eval_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.tasks.lm_eval.task.version", lambda name: version("no_such_package"))
    with pytest.raises(ValueError, match=r"a task of lm-eval needs .*: pip install 'kvbench\[lm-eval\]'$"):
        LmEval(name="gsm8k", task="gsm8k")


def test_the_citation_and_the_classifiers_are_those_of_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (kvbench.__version__, PROJECT["license"])
    assert cited["authors"] == PROJECT["authors"]
    least, beyond = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    named = re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["classifiers"]))
    assert [*map(int, named)] == [*range(int(least), int(beyond))]


def test_without_lm_eval_results_are_made_and_versions_agree_with_those_of_a_machine_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("kvbench.results.summary.version", missing)
    assert len(summary._benchmarks.__wrapped__()) == 32
    here = session.versions()
    there = {**here, "packages": {**here["packages"], "lm-eval": None}}
    assert session.other_versions([there], here) == session.other_versions([here], there) == ""
    newer = {**here, "packages": {**here["packages"], "lm-eval": "0"}}
    assert "lm-eval" in session.other_versions([newer], here)
