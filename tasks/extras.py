"""Imports of optional packages that an extra of kvbench installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def from_extra(extra: str, purpose: str) -> Iterator[None]:
    """Turn an ImportError into a ValueError that recommends `pip install 'kvbench[extra]'`.

    purpose: what the package is needed for, as the subject of the message.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        message = f"{purpose} needs {package}, which is not installed: pip install 'kvbench[{extra}]'"
        raise ValueError(message) from error
