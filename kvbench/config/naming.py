"""Full names of wrong fields: `window` of a scorer is typed as `policy.scorer.window`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from kvbench.config.tree import field_names
from kvbench.errors import ConfigError, UsageError


@contextmanager
def refusing_in(group: str, config: Mapping[str, Any], otherwise: str = "") -> Iterator[None]:
    """Turn the ValueError of a check on `config`, which stands under `group`, into a UsageError.

    The field of a ConfigError is named with its place; another sentence gets `otherwise` before it.
    """
    try:
        yield
    except ConfigError as error:
        raise _placed(group, config, error, otherwise) from error
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{otherwise}{(str(error).splitlines() or [type(error).__name__])[0]}") from error


def _placed(group: str, config: Mapping[str, Any], error: ConfigError, otherwise: str) -> UsageError:
    """The error with its field's place in `config`: in the one part that has it, or in `config` itself."""
    if error.field.startswith(f"{group}."):
        return error
    first = error.field.partition(".")[0]
    homes = [name for name, part in config.items() if isinstance(part, Mapping) and first in _fields(part)]
    if len(homes) == 1 and first not in config:
        return error.at(group, *homes)
    return error.at(group) if first in _fields(config) else UsageError(f"{otherwise}{error}")


def _fields(part: Mapping[str, Any]) -> set[str]:
    with suppress(ConfigError):  # its class cannot be had, which is what the sentence says then
        return {*field_names(part), *part}
    return {*part}
