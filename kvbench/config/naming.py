"""What a part says of its fields, with them named as they are typed: `launcher.workers`, `policy.scorer.window`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvbench.config.tree import PartError, field_names
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
        raise UsageError(placed(group, config, error, otherwise)) from error


def placed(group: str, config: Mapping[str, Any], error: Exception, otherwise: str = "") -> str:
    """The first line of an error about `config`, before it the place of the field that it begins with."""
    sentence = (str(error).splitlines() or [type(error).__name__])[0]
    if sentence.startswith(f"{group}."):
        return sentence
    where: Sequence[str] = error.where if isinstance(error, PartError) else ()
    if where:
        homes = {".".join((group, *where)): _at(config, where)}
    else:
        homes = {f"{group}.{name}": part for name, part in config.items() if isinstance(part, Mapping)}
    found = [home for home, part in homes.items() if _begins(sentence, part)]
    if not found and not where and _begins(sentence, config):
        found = [group]
    return f"{found[0]}.{sentence}" if len(found) == 1 else f"{otherwise}{sentence}"


def _at(config: Mapping[str, Any], where: Sequence[str]) -> Mapping[str, Any]:
    """The part at a place of a tree; empty where a list or nothing stands there."""
    for name in where:
        inner = config.get(name)
        config = inner if isinstance(inner, Mapping) else {}
    return config


def _begins(sentence: str, part: Mapping[str, Any]) -> bool:
    """Whether a sentence begins with a field of a part, or is about its class."""
    if "_target_" in part and sentence.startswith(f"_target_={part['_target_']} "):
        return True
    first = _FIRST.match(sentence)
    try:
        return first is not None and first[0] in {*field_names(part), *part} - {"_target_"}
    except ValueError:  # its class cannot be had, which the sentence says then
        return False
