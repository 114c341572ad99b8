"""Errors that a command reports as one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbench.errors import ConfigError, UsageError

__all__ = ["ConfigError", "UsageError", "refusing"]


@contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """Turn the ValueError of a check of the user's input into a UsageError, with `prefix` before its message."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, UsageError) and not isinstance(error, ConfigError):
            raise
        raise UsageError(f"{prefix}{error}") from error
