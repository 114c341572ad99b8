"""Update the outputs of commands in README.md and docs/answers.md.

    python scripts/readme_outputs.py

A `text` block that begins with `$ command` shows commands and their outputs; the commands of a block run in one new
folder. A block with a title is a file of that folder for all commands of the page. Run ids change with the code, so run
this script after a change of code that computes results; slow tests compare the pages with the outputs of the same
commands. It takes some minutes on two cores.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "answers.md")
BLOCK = re.compile(r"(?<=```text\n)\$ .*?(?=```)", re.DOTALL)
FILE = re.compile(r'```\w+ title="(?P<name>[^"]+)"\n(?P<content>.*?)```', re.DOTALL)


def shown(page: Path = PAGES[0]) -> list[str]:
    """The blocks of a page with commands and the outputs it shows."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(block: str) -> list[str]:
    """The commands of a block."""
    return re.findall(r"^\$ (.*)$", block, re.MULTILINE)


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows into a folder."""
    for found in FILE.finditer(page.read_text(encoding="utf-8")):
        path = folder / found["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found["content"], encoding="utf-8")


def in_python(words: list[str]) -> list[str]:
    """A command of a page as this Python runs it; `kvbench` need not be installed."""
    before = {"kvbench": ["-m", "kvbench"], "python": []}
    assert words[0] in before, f"the page shows the output of `{words[0]}`, which is neither kvbench nor python"
    return [sys.executable, *before[words[0]], *words[1:]]


def printed(command: str, folder: Path) -> str:
    """The output of a command that runs in `folder`."""
    return subprocess.run(
        in_python(shlex.split(command)),
        cwd=folder,
        env={**os.environ, "HF_DATASETS_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout


def main() -> None:
    """Run everything, then write."""
    for page in PAGES:
        outputs = {}
        for block in shown(page):
            with tempfile.TemporaryDirectory() as name:
                write_files(page, Path(name))
                outputs[block] = "".join(f"$ {one}\n{printed(one, Path(name))}" for one in commands(block))
        text = page.read_text(encoding="utf-8")
        page.write_text(BLOCK.sub(lambda found, outputs=outputs: outputs[found[0]], text), encoding="utf-8")


if __name__ == "__main__":
    main()
