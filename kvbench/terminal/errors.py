"""The error that is the user's to mend: shown as one sentence, without a traceback, exit code 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_PYTHONS = re.compile(r"(=|\bgot )(None|True|False)\b")
_TYPED = {"None": "null", "True": "true", "False": "false"}


class UsageError(ValueError):
    """A wrong value of a field: the message names field, value as it is typed, and what is allowed."""

    def __init__(self, sentence: str) -> None:
        super().__init__(_PYTHONS.sub(lambda found: found[1] + _TYPED[found[2]], sentence))


@contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """Turn the ValueError of a check on what the user asked for into a UsageError, `prefix` before its sentence."""
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{prefix}{error}") from error
