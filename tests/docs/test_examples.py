"""The pages on extending do what they say: with the files of a page alone, its commands run and its tests pass."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from kvbench.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("policy", "pre_pass", "reader", "watcher", "protection", "task", "parts")
SHOWN = ("policy", "reader")
"""The pages with the output of their first command."""


def text_of(page: str) -> str:
    return (DOCS / "extend" / f"{page}.md").read_text(encoding="utf-8")


def files_of(page: str) -> dict[str, str]:
    """The files of a page by their paths; a page may show one in several blocks."""
    files: dict[str, str] = {}
    for title, block in re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', text_of(page), re.DOTALL):
        files[title] = f"{files[title]}\n\n{block}" if title in files else block
    return files


def commands_of(page: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", text_of(page), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def own(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A page; its files are in the working folder, which is not on the path, as for the console script."""
    page: str = request.param
    for name, content in files_of(page).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    before = {*sys.modules}
    yield page
    for module in [*sys.modules.keys() - before]:
        if getattr(sys.modules[module], "__file__", None) and str(tmp_path) in str(sys.modules[module].__file__):
            del sys.modules[module]


@pytest.mark.parametrize("own", SHOWN, indirect=True)
def test_the_first_command_prints_what_the_page_shows(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    start, *arguments = shlex.split(commands_of(own)[0])
    assert start == "kvbench"
    assert main([*arguments, "device=cpu"]) == 0
    (shown,) = re.findall(r"```text\n(.*?)```", text_of(own), re.DOTALL)
    assert capsys.readouterr().out.startswith(shown)  # scores, bytes, peaks and the layout


@pytest.mark.slow("starts the console script for every command of the pages")
@pytest.mark.parametrize("own", PAGES, indirect=True)
def test_the_console_script_runs_every_command(own: str) -> None:
    script = Path(sys.executable).with_name("kvbench")
    if not script.exists():
        pytest.skip("kvbench is not installed")
    repository = str(DOCS.parent / "src")  # which an editable install has on the path, too
    for command in commands_of(own):
        start, *arguments = shlex.split(command)
        assert start == "kvbench"
        done = subprocess.run(
            [str(script), *arguments, "device=cpu"],
            env={**os.environ, "PYTHONPATH": repository},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, "results: " in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("own", [page for page in PAGES if page != "parts"], indirect=True)
def test_the_tests_of_a_page_pass(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    (name,) = (path.removesuffix(".py") for path in files_of(own) if path.startswith("test_"))
    module = import_module(name)
    tests = [function for key, function in inspect.getmembers(module, inspect.isfunction) if key.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_the_files_of_the_pages_are_those_of_the_folder_of_examples() -> None:
    """Without blank lines, since a page may show one class of a file in a block of its own."""
    shown = {name: _lines(text) for page in PAGES for name, text in files_of(page).items()}
    files = [path for path in sorted((DOCS / "examples").rglob("*.*")) if path.suffix in (".py", ".yaml")]
    assert shown == {
        str(path.relative_to(DOCS / "examples")): _lines(path.read_text(encoding="utf-8")) for path in files
    }


def _lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip())
