"""The files of docs/examples do what the pages say: their commands run, their tests pass, as they stand."""

import inspect
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from parameters import few_fast

from kvbench.cli import main

DOCS = Path(__file__).parents[2] / "docs"
MODULES = (
    "vatp",
    "hint",
    "phonebook",
    "parts",
    "centroid",
    "test_vatp",
    "test_hint",
    "test_phonebook",
    "test_centroid",
)
PAGES = ("policy", "pre_pass", "reader", "task", "parts")


def commands() -> list[str]:
    """The commands in the `sh` blocks of the pages on extending."""
    texts = ((DOCS / "extend" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
    blocks = [block for text in texts for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of one's own with the files, as a command finds it."""
    shutil.copytree(DOCS / "examples", tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "own")
    monkeypatch.syspath_prepend(tmp_path / "own")
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path / "own"
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "command",
    few_fast(commands(), [one for one in commands() if "limit=5" in one], pytest.mark.slow("runs every command")),
)
def test_a_command_of_the_pages_runs(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start, *arguments = shlex.split(command)
    assert start == "kvbench"
    assert main([*arguments, "device=cpu"]) == 0
    printed = capsys.readouterr().out
    assert "phonebook" in printed
    if "limit=5" in command:  # what the page shows
        page = "reader" if "centroid" in command else "policy"
        (shown,) = re.findall(r"```text\n(.*?)```", (DOCS / "extend" / f"{page}.md").read_text(), re.DOTALL)
        assert printed.startswith(shown)  # scores, bytes, peaks and the layout


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("test_")])
def test_the_tests_of_the_pages_pass(name: str, folder: Path) -> None:
    module = import_module(name)
    tests = [function for key, function in inspect.getmembers(module, inspect.isfunction) if key.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_the_code_of_the_pages_is_that_of_the_files_and_every_file_is_on_a_page() -> None:
    """Without blank lines, since a page may show one class of a file in a block of its own."""
    texts = "".join((DOCS / "extend" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
    blocks = [_lines(block) for block in re.findall(r"```(?:python|yaml)[^\n]*\n(.*?)```", texts, re.DOTALL)]
    files = [path for path in sorted((DOCS / "examples").rglob("*.*")) if path.suffix in (".py", ".yaml")]
    contents = {path.name: _lines(path.read_text(encoding="utf-8")) for path in files}
    assert [block for block in blocks if not any(block in content for content in contents.values())] == []
    assert [name for name, content in contents.items() if not any(block in content for block in blocks)] == []


def _lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip())
