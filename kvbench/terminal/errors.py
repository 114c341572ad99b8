"""The error that is the user's to mend: shown as one sentence, without a traceback, exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """A wrong value of a field: the message names field, value and what is allowed."""


@contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """Turn the ValueError of a check on what the user asked for into a UsageError, `prefix` before its sentence."""
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{prefix}{error}") from error
