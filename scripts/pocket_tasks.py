"""What pocket models are measured on: kvbench's offline tasks at one length."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.tasks.arithmetic import Arithmetic
from kvbench.tasks.niah import Niah
from kvbench.tasks.ruler.common_words import CommonWords
from kvbench.tasks.ruler.frequent_words import FrequentWords
from kvbench.tasks.ruler.niah import RulerNiah
from kvbench.tasks.ruler.variable_tracking import VariableTracking
from kvbench.tasks.task import Task


def tasks(length: int, repeats: int = 2) -> Iterator[Task]:
    """The task niah in several forms, RULER's offline tasks, arithmetic. repeats: of each of niah's ten depths."""
    grid = {"lengths": (length,), "repeats": repeats}
    yield Niah(**grid)
    yield Niah(name="niah_noise", haystack="noise", **grid)
    yield Niah(name="niah_multikey", keys=8, **grid)
    yield Niah(name="niah_multiquery", keys=8, queries=4, max_new_tokens=64, **grid)
    yield Niah(name="niah_multivalue", values=4, max_new_tokens=64, **grid)
    yield RulerNiah(name="ruler niah_single_1", length=length)
    yield RulerNiah(name="ruler niah_multikey_2", length=length, haystack="needle")
    yield RulerNiah(name="ruler niah_multikey_3", length=length, haystack="needle", key="uuids", value="uuids")
    yield RulerNiah(name="ruler multivalue, noise", length=length, values=4)
    yield RulerNiah(name="ruler multiquery, noise", length=length, keys=4, queries=4)
    yield VariableTracking(name="ruler vt", length=length)
    yield CommonWords(name="ruler cwe", length=length)
    yield FrequentWords(name="ruler fwe", length=length)
    yield Arithmetic(**grid)
