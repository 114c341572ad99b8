"""What a user can mend: errors that are one sentence. Every room may import this module; it imports none."""

from __future__ import annotations

import re

_WORD = re.compile(r"([A-Za-z_/.~][\w/.~:@+-]*)?")
_TYPED = {"None": "null", "True": "true", "False": "false"}


class UsageError(ValueError):
    """What was asked for cannot be done: shown as one sentence, without a traceback, exit code 2."""


class ConfigError(UsageError):
    """A wrong value of a field.

    field: as its part calls it; `at` says where the part stands. allowed: what the value must be, or else why: what
    is wrong with it.
    """

    def __init__(self, field: str, value: object, allowed: str = "", why: str = "") -> None:
        self.field, self.value, self.allowed, self.why = field, value, allowed, why
        got = f"a {value.__name__}" if isinstance(value, type) else _TYPED.get(repr(value), repr(value))
        written = value if isinstance(value, str) and _WORD.fullmatch(value) else got  # as on the command line
        said = f"{field}={written}{' ' * (why[:1] not in ':,')}{why}"
        super().__init__(said if why else f"{field} must be {allowed}, got {got}")

    def at(self, *place: str) -> ConfigError:
        """The same error with its field named from further up: `policy.scorer.window`."""
        return ConfigError(".".join((*place, self.field)), self.value, self.allowed, self.why)
