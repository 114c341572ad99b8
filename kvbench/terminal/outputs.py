"""Checks of output files, before anything is read or computed, and errors of writing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvbench.errors import UsageError


def check_output(path: Path, suffixes: Sequence[str] = (), makes_folder: bool = False) -> None:
    """Raise UsageError if `-o path` cannot be a file with one of `suffixes` (empty: any).

    makes_folder: the command creates the folder of the file.
    """
    if path.name in suffixes:
        raise UsageError(f"-o {path} needs a name before {path.name}")
    if suffixes and path.suffix not in suffixes:
        raise UsageError(f"-o {path} must end in {'one of ' * (len(suffixes) > 1)}{', '.join(suffixes)}")
    if path.exists() and not path.is_file():
        raise UsageError(f"-o {path} cannot be written: it is not a file")
    check_folder(path.parent, makes_folder, f"-o {path}")


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Turn an error of writing into a UsageError about `-o output`."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise UsageError(f"-o {output} cannot be written ({getattr(error, 'strerror', '') or error})") from error


def check_folder(folder: Path, is_made: bool, what: str) -> None:
    """Raise UsageError unless `folder` is a folder or, if it will be created, its nearest existing parent is one."""
    there = folder
    while is_made and not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        why = "is not a folder" if there.exists() else "does not exist"
        raise UsageError(f"{what} cannot be written: {there} {why}")
