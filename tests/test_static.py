"""The folders at the top level are one package, and slow tests are marked with a reason."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("conf", "kernels", "policies", "tasks")


@pytest.mark.parametrize("folder", LINKED)
def test_a_relative_link_joins_each_folder_into_the_package(folder: str) -> None:
    assert os.readlink(ROOT / "kvbench" / folder) == f"../{folder}"


def test_an_install_finds_every_package_once_and_no_folder_of_the_top_level() -> None:
    setuptools = pytest.importorskip("setuptools")
    folders = [ROOT / "kvbench", *(ROOT / name for name in LINKED)]
    inits = [init.parent.relative_to(ROOT) for folder in folders for init in folder.rglob("__init__.py")]
    names = [".".join(("kvbench", *path.parts) if path.parts[0] != "kvbench" else path.parts) for path in inits]
    assert sorted(setuptools.find_packages(str(ROOT / "src"))) == sorted(names)


def test_every_slow_test_says_what_takes_so_long() -> None:
    silent = re.compile(r"mark\.slow(?!\(\")")
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert [path.name for path in files if silent.search(path.read_text(encoding="utf-8"))] == []
