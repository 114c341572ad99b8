"""The flags of a command line; all other arguments are fields, written `field=value`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvbench.errors import UsageError
from kvbench.terminal.command import Parser


class _Flags(Parser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (fields are written field=value, without dashes; --help lists them)")


def read_flags(arguments: Sequence[str]) -> Namespace:
    """The values of the flags; `overrides` holds all other arguments.

    Raises UsageError for an unknown flag, and where --config-dir is no folder.
    """
    parser = _Flags("python -m kvbench", add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    parser.add_argument("-c", "--cfg", choices=("job",))
    parser.add_argument("overrides", nargs="*", default=[])
    told = parser.parse_intermixed_args(list(arguments))
    if told.config_dir is not None and not (told.config_dir and Path(told.config_dir).is_dir()):
        raise UsageError(f"--config-dir {told.config_dir} is not a folder")
    return told
