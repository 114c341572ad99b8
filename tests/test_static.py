"""The folders at the top level are one package to every tool: a wrong call from one into another is seen."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("conf", "kernels", "policies", "tasks")
PLANTED = {
    "kvbench/planted.py": "from kvbench.policies.schedule import Blocks\n\nBlocks(size='many')\n",
    "policies/planted.py": "from kvbench.kernels.references import widen\n\nwiden('keys')\n",
    "kvbench/asked.py": "from kvbench.tasks.task import PlainTokenizer\n\nPlainTokenizer(None).decode('ids')\n",
}


@pytest.mark.parametrize("folder", LINKED)
def test_a_relative_link_joins_each_folder_into_the_package(folder: str) -> None:
    assert os.readlink(ROOT / "kvbench" / folder) == f"../{folder}"


def test_an_install_finds_every_package_once_and_no_folder_of_the_top_level() -> None:
    setuptools = pytest.importorskip("setuptools")
    folders = [ROOT / "kvbench", *(ROOT / name for name in LINKED)]
    inits = [init.parent.relative_to(ROOT) for folder in folders for init in folder.rglob("__init__.py")]
    names = [".".join(("kvbench", *path.parts) if path.parts[0] != "kvbench" else path.parts) for path in inits]
    assert sorted(setuptools.find_packages(str(ROOT / "src"))) == sorted(names)


@pytest.mark.slow("checks types")
def test_a_wrong_call_from_one_folder_into_another_is_an_error_of_types(tmp_path: Path) -> None:
    for name in ("kvbench", *LINKED):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, source in PLANTED.items():
        (tmp_path / path).write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "kvbench"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line.split(":")[0] for line in sorted(found)] == sorted(
        ["kvbench/asked.py", "kvbench/planted.py", "kvbench/policies/planted.py"]
    )
    assert all("[arg-type]" in line for line in found)


def test_every_slow_test_says_what_takes_so_long() -> None:
    silent = re.compile(r"mark\.slow(?!\(\")")
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert [path.name for path in files if silent.search(path.read_text(encoding="utf-8"))] == []
