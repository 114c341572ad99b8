"""Small files that are whole or absent: written beside their place, then moved into it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from threading import get_ident
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # written in C where there is one: 8 times as fast
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader, or a kill at any moment, sees the old or the new file, never a part.

    Does nothing where the file says `text` already. Raises OSError (full disk, no permission) and leaves no litter.
    """
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    beside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{get_ident()}")
    try:
        with beside.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def remove_torn(folder: Path) -> None:
    """Remove files that were not whole yet when their process was killed. The caller owns the folder."""
    for path in (*folder.glob(".*.json.*"), *folder.glob(".*.yaml.*")):
        path.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity are refused, because JSON has neither."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_yaml(path: Path, value: object) -> None:
    """Write `value` as YAML, atomically, keys in the order given."""
    write_atomically(path, yaml_text(value))


def yaml_text(value: object) -> str:
    """`value` as YAML, keys in the order given."""
    return str(yaml.dump(value, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=120))


def read_yaml(path: Path) -> Any:  # noqa: ANN401 - whatever YAML holds
    """What a YAML file says. Raises OSError, and yaml.YAMLError where it is none."""
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)
