"""What only some tasks need is not installed with kvbench: an extra brings it, and its absence is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def from_extra(extra: str, purpose: str) -> Iterator[None]:
    """Around the imports of what `kvbench[extra]` brings: ValueError with the command where it is not installed.

    purpose: what it is needed for, as the subject of that sentence.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        sentence = f"{purpose} needs {package}, which is not installed: pip install 'kvbench[{extra}]'"
        raise ValueError(sentence) from error
