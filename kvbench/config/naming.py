"""What a part says of its fields, with them named as they are typed: `launcher.workers`, `policy.scorer.window`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvbench.config.tree import field_names
from kvbench.terminal.errors import UsageError

_FIRST = re.compile(r"\w+")


@contextmanager
def refusing_in(group: str, config: Mapping[str, Any], otherwise: str = "") -> Iterator[None]:
    """Turn the ValueError of a check on `config`, which stands under `group`, into a UsageError.

    A sentence that begins with a field of it, or of one part in it, is given that field's place; another one gets
    `otherwise` before it.
    """
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(place(group, config, str(error), otherwise) + str(error)) from error


def place(group: str, config: Mapping[str, Any], sentence: str, otherwise: str = "") -> str:
    """What stands before the field that a sentence begins with: "policy.scorer." """
    if sentence.startswith(f"{group}."):
        return ""
    parts = {f"{group}.{name}.": part for name, part in config.items() if isinstance(part, Mapping)}
    homes = [home for home, part in parts.items() if _begins(sentence, part)]
    if not homes and _begins(sentence, config):
        homes = [f"{group}."]
    return homes[0] if len(homes) == 1 else otherwise


def _begins(sentence: str, part: Mapping[str, Any]) -> bool:
    """Whether a sentence begins with a field of a part, or is about its class."""
    if "_target_" in part and sentence.startswith(f"_target_={part['_target_']} "):
        return True
    first = _FIRST.match(sentence)
    try:
        return first is not None and first[0] in {*field_names(part), *part} - {"_target_"}
    except ValueError:  # its class cannot be had, which the sentence says then
        return False
