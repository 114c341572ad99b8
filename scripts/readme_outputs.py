"""Update the outputs of commands in README.md.

    python scripts/readme_outputs.py

A block that begins with `$ command` shows a command and its output. Run ids change with the code, so run this script
after a change of code that computes results; slow tests in tests/kvbench/test_readme.py compare the README with the
outputs of the same commands. It takes some minutes on two cores.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(?<=```text\n)\$ (?P<command>[^\n]+)\n(?P<output>.*?)(?=```)", re.DOTALL)


def shown() -> list[tuple[str, str]]:
    """The commands of the README with the outputs it shows."""
    return [(found["command"], found["output"]) for found in BLOCK.finditer(README.read_text(encoding="utf-8"))]


def printed(command: str, folder: Path) -> str:
    """The output of a command that runs in `folder`."""
    python, *arguments = shlex.split(command)
    assert python == "python", f"the README shows the output of `{command}`, which is not a Python command"
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True
    ).stdout


def main() -> None:
    """Run everything, then write."""
    outputs = {}
    for command, _ in shown():
        with tempfile.TemporaryDirectory() as folder:
            outputs[command] = printed(command, Path(folder))
    text = README.read_text(encoding="utf-8")
    new = BLOCK.sub(lambda block: f"$ {block['command']}\n{outputs[block['command']]}", text)
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
