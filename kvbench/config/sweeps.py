"""Experiments that are a paper's table: several sweeps, since no single product of values makes a paper's grid.

`conf/experiment/caote/table2.yaml` says under `sweeps` what differs from sweep to sweep: lists of `SWEPT`, every
combination of which is a run, and further fields that all runs of the sweep share. Each sweep becomes a command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from kvbench.config.flags import read_flags
from kvbench.config.tree import find, load
from kvbench.terminal.errors import UsageError

SWEPT = ("model", "policy", "budget", "task")
Sweep = Mapping[str, tuple[str, ...]]
"""Field -> the words it may have; only fields of `SWEPT` have several."""


def command_lines(arguments: Sequence[str]) -> list[list[str]]:
    """The arguments themselves or, where `experiment=` names a table, one list of arguments for each of its sweeps.

    What else is given holds for every sweep. Of a field that a sweep lists, values of the table select runs, and values
    that are nowhere in it take the place of those that are: the table's protocol with a model of one's own, say. Not so
    policies, which the protocol depends on. Raises UsageError for one that the table does not have, where some values
    are in the table and others are not, or where nothing is left.
    """
    told = read_flags(arguments)
    experiments = [word for word in told.overrides if word.startswith("experiment=")]
    folders = (Path(told.config_dir).resolve(),) if told.config_dir else ()
    found = [read(name, folders) for word in experiments for name in word.partition("=")[2].split(",")]
    if not any(found):
        return [list(arguments)]
    if not all(found):
        raise UsageError(f"{experiments[0]} names a table and another experiment, which cannot be run in one sweep")
    flags = [argument for argument in arguments if argument not in told.overrides]
    rest = [word for word in told.overrides if word not in experiments]
    chosen = narrowed([sweep for sweeps in found for sweep in sweeps], rest, experiments[0])
    listed = {key for sweep in chosen for key in sweep}
    others = [word for word in rest if _key(word) not in listed]
    multirun = [] if told.multirun else ["-m"]
    return [[*flags, *multirun, *words(sweep), *others] for sweep in chosen]


def read(name: str, folders: Sequence[Path] = ()) -> tuple[Sweep, ...]:
    """The sweeps of an experiment; none where it is not a table, or there is no such file."""
    file = find("experiment", name, folders)
    try:
        given = (load(file) if file is not None else {}).get("sweeps", ())
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not isinstance(given, list | tuple) or not all(isinstance(sweep, dict) for sweep in given):
        raise UsageError(f"{file} cannot be read: sweeps must be a list, with the fields of one sweep in each entry")
    return tuple({key: _values(key, value) for key, value in sweep.items()} for sweep in given)


def words(sweep: Sweep) -> list[str]:
    """A sweep as the command line has it: `policy=snapkv,caote_snapkv`."""
    return [f"{key}={','.join(values)}" for key, values in sweep.items()]


def cells(sweep: Sweep) -> Iterator[list[str]]:
    """The command line of every run of a sweep, in the order in which Hydra runs them."""
    for values in product(*sweep.values()):
        yield [f"{key}={value}" for key, value in zip(sweep, values, strict=True)]


def narrowed(sweeps: Sequence[Sweep], given: Sequence[str], what: str) -> list[Sweep]:
    """The sweeps with what `given` (`key=value,value`) says of their fields; see `command_lines`."""
    left = list(sweeps)
    for argument in given:
        key, _, value = argument.partition("=")
        known = {one for sweep in sweeps for one in sweep.get(key, ())}
        if known:
            left = _with(left, key, tuple(value.split(",")) if key in SWEPT else (value,), known, what)
    return left


def _with(sweeps: Sequence[Sweep], key: str, asked: tuple[str, ...], known: set[str], what: str) -> list[Sweep]:
    strangers = [value for value in asked if value not in known]
    if strangers and (len(strangers) < len(asked) or key == "policy"):
        raise UsageError(f"{key}={','.join(asked)}: {', '.join(strangers)} is not in {what}, which has {_some(known)}")
    left: dict[str, Sweep] = {}
    for sweep in sweeps:
        own = sweep.get(key)
        values = own if own is None else asked if strangers else tuple(value for value in own if value in asked)
        if values is None or values:
            one = sweep if values is None else {**sweep, key: values}
            left.setdefault(" ".join(words(one)), one)
    if not left:
        raise UsageError(f"{key}={','.join(asked)} leaves no run of {what}")
    return list(left.values())


def word(value: Any) -> str:  # noqa: ANN401 - whatever YAML holds
    """A value as the command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(word, value))}]" if isinstance(value, list | tuple) else str(value)


def _values(key: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401
    return tuple(map(word, value)) if key in SWEPT and isinstance(value, list) else (word(value),)


def _some(known: set[str]) -> str:
    return ", ".join(sorted(known))


def _key(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0]
