"""The pages of the repository and their texts, as tests of the documentation read them."""

import re
import shlex
from pathlib import Path

from kvbench import make_policy

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "results").glob("*/README.md")),
]
CODE = re.compile(r"`([^`\n]+)`")


def read(path: Path | str) -> str:
    """A file by its path in the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def prose(path: Path | str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"```.*?```", "", read(path), flags=re.DOTALL)


def files(*folders: str, kinds: tuple[str, ...] = (".py", ".yaml")) -> list[Path]:
    """The files of these kinds below folders of the repository."""
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]


def policy_exists(name: str) -> bool:
    """Whether a name is that of a policy, a composed one too; some are named because they are refused."""
    try:
        make_policy(name, 64)
    except ValueError as error:
        return "does not exist" not in str(error)
    return True


def runs(text: str) -> list[list[str]]:
    """The words after `kvbench` of every run and sweep in a text's blocks of code, without comments."""
    lines = (line.partition(" #")[0].strip().removeprefix("$ ") for line in text.splitlines())
    commands = (line.removeprefix("python -m ") for line in lines if re.match("(python -m )?kvbench ", line))
    found = [shlex.split(command)[1:] for command in commands]
    return [words for words in found if words and (words[0] == "-m" or "=" in words[0])]  # no prose, no sub-command
