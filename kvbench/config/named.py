"""The configuration of a name in one of the groups `model`, `policy`, `task`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvbench.config.tree import CONF, Config, find, load, part_class, read


def named_config(group: str, name: str, folders: Sequence[Path] = ()) -> Config | None:
    """What `group=name` stands for: a file of conf/, or a composed name; None if it is neither.

    A file of `folders` is None as well, for Hydra reads it: they are searched for the parts of composed names only.
    """
    file = find(group, name)
    if file is not None and file.is_relative_to(CONF):
        return read(group, name)
    if find(group, name, folders):
        return None
    if group == "model":
        path = os.path.expanduser(name)
        return {**read("model", "hub"), "path": path} if path.startswith(("/", ".")) else None
    if group == "task":
        return _task(name, folders)
    from kvbench.config.presets import composed  # imports torch, which other names need not wait for

    config = composed(name, folders)
    return None if config is None else {key: value for key, value in config.items() if key != "name"}


def _task(name: str, folders: Sequence[Path]) -> Config | None:
    """`lm_eval/gsm8k`: the file `lm_eval`, whose class has a field (`named_by`) for names of its own."""
    suite, _, own = name.partition("/")
    file = find("task", suite, folders)
    if not own or file is None or "_target_" not in load(file):
        return None
    config = read("task", suite, folders)
    field = getattr(part_class(config), "named_by", None)
    return None if field is None else {**config, field: own, "name": name.replace("/", "_")}
