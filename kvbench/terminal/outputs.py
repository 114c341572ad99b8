"""Files that a command is told to write: refused before anything is read or computed for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.terminal.errors import UsageError


def check_output(path: Path, suffixes: Sequence[str] = (), makes_folder: bool = False) -> None:
    """Raise UsageError where `-o path` cannot be a file with one of `suffixes` (none: any).

    makes_folder: the folder it is in is made when it is written.
    """
    if path.name in suffixes:
        raise UsageError(f"-o {path} needs a name before {path.name}")
    if suffixes and path.suffix not in suffixes:
        raise UsageError(f"-o {path} must end in {'one of ' * (len(suffixes) > 1)}{', '.join(suffixes)}")
    if path.exists() and not path.is_file():
        raise UsageError(f"-o {path} cannot be written: it is no file")
    check_folder(path.parent, makes_folder, f"-o {path}")


def check_folder(folder: Path, is_made: bool, what: str) -> None:
    """Raise UsageError where `folder`, or what there is of the way to it where it is made, is no folder."""
    there = folder
    while is_made and not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        why = "is no folder" if there.exists() else "does not exist"
        raise UsageError(f"{what} cannot be written: {there} {why}")
