"""Errors that a command answers in one sentence, and how a check's error becomes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbench.errors import ConfigError, UsageError

__all__ = ["ConfigError", "UsageError", "refusing"]


@contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """Turn the ValueError of a check on what the user asked for into a UsageError, `prefix` before its sentence."""
    try:
        yield
    except UsageError as error:
        if prefix and isinstance(error, ConfigError):  # of a part, which knows nothing of what stands before it
            raise UsageError(f"{prefix}{error}") from error
        raise
    except ValueError as error:
        raise UsageError(f"{prefix}{error}") from error
