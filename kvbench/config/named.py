"""Names of models, policies and tasks without a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvbench.config.tree import Config, find, load, part_class, read


def composed_config(group: str, name: str, folders: Sequence[Path] = ()) -> Config | None:
    """The configuration of a composed name: `model=/folder`, `task=lm_eval/gsm8k`, `policy=caote_knorm`; else None.

    folders: searched before conf/ for the files of its parts.
    """
    if group == "model":
        path = os.path.expanduser(name)
        return {**read("model", "hub"), "path": path} if path.startswith(("/", ".")) else None
    if group == "task":
        suite, _, own = name.partition("/")
        file = find("task", suite, folders)
        if not own or file is None or "_target_" not in load(file):
            return None
        config = read("task", suite, folders)
        field = getattr(part_class(config), "named_by", None)  # the field for names of a suite's own
        return None if field is None else {**config, field: own, "name": name.replace("/", "_")}
    from kvbench.config.presets import composed  # imports torch, which other names need not wait for

    found = composed(name, folders)
    return None if found is None else {key: value for key, value in found.items() if key != "name"}


def named_config(group: str, name: str, folders: Sequence[Path] = ()) -> Config:
    """The configuration of `group=name`, of a file or composed. Raises UsageError if there is none."""
    found = None if find(group, name, folders) else composed_config(group, name, folders)
    return read(group, name, folders) if found is None else found
