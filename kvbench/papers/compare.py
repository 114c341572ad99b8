"""Our runs beside the published numbers, in a table in which the two never share a column."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvbench.analysis.result import Result
from kvbench.papers import arrangement
from kvbench.papers.choice import Choice
from kvbench.papers.footnotes import letter
from kvbench.papers.held import predicted_bytes
from kvbench.papers.layout import Layout, budget_text, label
from kvbench.papers.matching import Measured, Runs, average, measured
from kvbench.papers.protocol import Cannot, Plan, plan, runs_of
from kvbench.papers.published import Number
from kvbench.papers.sweeps import Key, in_sweeps, key_of
from kvbench.report.grid import Block, Cell, Grid, Row

HEADER = ("published", "ours", "95% interval", "difference", "n", "tokens", "MiB", "predicted", "to do")
OURS = HEADER[1:7]
PERCENT_DIGITS = 2
PROMPT = 8192
WHAT = (
    f"n: examples. tokens, MiB: held at the end, per KV head and in all. predicted: MiB after {PROMPT:,} prompt tokens."
)


@dataclass(frozen=True)
class Line:
    """A published number with what we have of it: measured, or the runs that are missing, or why there can be none."""

    number: Number
    measured: Measured | None = None
    missing: tuple[Plan, ...] = ()
    cannot: Cannot | None = None
    remarks: tuple[str, ...] = ()


def compare(name: str, runs: Sequence[Result], choice: Choice | None = None) -> Grid:
    """The published table `name` beside `runs`: a row a number, or one for all of a method that nothing is known of.

    choice: what of the table; None: all of it.

    What was not measured has the number of a command that measures it, or a letter: why it cannot be. Raises UsageError
    for an unknown table.
    """
    chosen = arrangement.numbers(name) if choice is None else [n for n in choice.numbers(name) if n.printed]
    layout = Layout(arrangement.arrangement(name), chosen)
    known = Runs(runs)
    lines = [_line(number, known) for number in _ordered(layout.numbers)]
    todo = Todo(lines)
    blocks = []
    for (table, model, budget), members in groupby(lines, key=lambda line: _block_of(line.number)):
        part = table if layout.plan.parts else ""
        title = ", ".join(filter(None, (part, model, f"budget {budget}" if budget else "")))
        blocks.append(Block(title, tuple(_rows(layout, list(members), todo))))
    return Grid(
        name=name,
        title=f"{layout.plan.title}, ours beside the print",
        corner="method, task",
        header=tuple((words,) for words in HEADER),
        blocks=tuple(blocks),
        notes=(*(("", said) for said in (*_about(name, lines, choice), WHAT)), *todo.sentences),
    )


def _block_of(number: Number) -> tuple[str, str, str]:
    return number.table, number.model, budget_text(number)


def _ordered(numbers: Sequence[Number]) -> list[Number]:
    """Block by block and method by method, each in the order of its first appearance."""
    places: dict[object, int] = {}
    for number in numbers:
        for key in (_block_of(number), number.method):
            places.setdefault(key, len(places))
    return sorted(numbers, key=lambda number: (places[_block_of(number)], places[number.method]))


def _line(number: Number, runs: Runs) -> Line:
    own = plan(number)
    if isinstance(own, Cannot):
        return Line(number, cannot=own)
    plans = list(runs_of(number))
    found = [runs.find(one) for one in plans]
    notes = tuple(dict.fromkeys([*own.notes, *(note for one in plans for note in one.notes)]))
    missing = tuple(one for one, (run, _) in zip(plans, found, strict=True) if run is None)
    if missing:
        return Line(number, missing=missing, remarks=(*notes, *dict.fromkeys(r for _, r in found if r)))
    made = [run for run, _ in found if run is not None]
    got = average(plans, made) if own.measure == "average" else measured(own, made[0])
    return Line(number, remarks=(*notes, got)) if isinstance(got, str) else Line(number, got, remarks=notes)


class Todo:
    """Commands that fill the holes, numbered, a sweep each; and remarks, lettered."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.sentences: list[tuple[str, str]] = []
        self._numbers: dict[Key, str] = {}
        self._letters: dict[str, str] = {}
        missing = {key_of(one): one for line in lines for one in line.missing}
        for number, sweep in enumerate(in_sweeps(missing.values()), start=1):
            self._numbers |= dict.fromkeys(sweep.keys, str(number))
            self.sentences.append((str(number), shlex.join(sweep.command)))

    def commands(self, line: Line) -> tuple[str, ...]:
        """Numbers of the commands that a line waits for."""
        return tuple(dict.fromkeys(self._numbers[key_of(one)] for one in line.missing))

    def remarks(self, line: Line) -> tuple[str, ...]:
        """Letters of the remarks on a line."""
        said = [f"cannot be run: {_with_source(line.cannot)}"] if line.cannot else list(line.remarks)
        return tuple(self._letter(sentence) for sentence in said)

    def _letter(self, sentence: str) -> str:
        if sentence not in self._letters:
            self._letters[sentence] = letter(len(self._letters))
            self.sentences.append((self._letters[sentence], sentence + "."))
        return self._letters[sentence]


def _with_source(cannot: Cannot) -> str:
    return f"{cannot.reason} ({cannot.source})" if cannot.source else cannot.reason


def _rows(layout: Layout, lines: Sequence[Line], todo: Todo) -> Iterator[Row]:
    several = len({number.metric for number in layout.numbers}) > 1
    for _, members in groupby(lines, key=lambda line: line.number.method):
        own = list(members)
        known = any(line.measured for line in own)
        for _, alike in groupby(own, key=lambda line: id(line) if known else (todo.commands(line), todo.remarks(line))):
            group = list(alike)
            yield _row(layout, group[0], todo, several) if known or len(group) == 1 else _summary(layout, group, todo)


def _summary(layout: Layout, lines: Sequence[Line], todo: Todo) -> Row:
    """One row for the numbers of a method of which none was measured."""
    method = label(layout.plan, "method", lines[0].number.method)
    alike = {_predicted(line).text for line in lines}
    held = _predicted(lines[0]) if len(alike) == 1 else Cell("")
    cells = [Cell(""), *[Cell("", hole=True)] * len(OURS), held, _what_to_do(lines[0], todo)]
    return Row(f"{method}, {len(lines)} numbers", tuple(cells), todo.remarks(lines[0]))


def _row(layout: Layout, line: Line, todo: Todo, metric: bool) -> Row:
    number, got = line.number, line.measured
    fields = ("method", "task", "metric") if metric else ("method", "task")
    words = ", ".join(filter(None, (label(layout.plan, field, getattr(number, field)) for field in fields)))
    holes = [Cell("", hole=True)] * len(OURS)
    ours = holes if got is None else [Cell(text, hole=not text) for text in _texts(number, got)]
    return Row(words, (Cell(number.printed), *ours, _predicted(line), _what_to_do(line, todo)), todo.remarks(line))


def _predicted(line: Line) -> Cell:
    """MiB that the policy is predicted to hold; a hole where that depends on the prompt or there is no run."""
    plans = [] if line.cannot else list(runs_of(line.number))
    found = {predicted_bytes(one, PROMPT) for one in plans}
    nbytes = next(iter(found)) if len(found) == 1 else None
    return Cell("", hole=True) if nbytes is None else Cell(f"{nbytes / 2**20:.1f}")


def _what_to_do(line: Line, todo: Todo) -> Cell:
    return Cell(" ".join(f"[{number}]" for number in todo.commands(line)))


def _texts(number: Number, got: Measured) -> list[str]:
    """The texts of the columns `OURS`."""
    digits = max(PERCENT_DIGITS, len(number.printed.partition(".")[2]))
    interval = "" if got.low is None or got.high is None else f"{got.low:.{digits}f} to {got.high:.{digits}f}"
    return [
        f"{got.value:.{digits}f}",
        interval,
        f"{got.value - number.value:+.{digits}f}",
        str(got.n),
        f"{got.kept:.1f}",
        f"{got.nbytes / 2**20:.3f}",
    ]


def _about(name: str, lines: Sequence[Line], choice: Choice | None) -> list[str]:
    """The notes: how much was measured, the settings of the runs, and licences to accept."""
    plans = [one for line in lines if line.cannot is None for one in runs_of(line.number)]
    counts = [
        sum(map(bool, having)) for having in zip(*((x.measured, x.missing, x.cannot) for x in lines), strict=True)
    ]
    said = ["{} of {} numbers measured, {} to be run, {} cannot be.".format(counts[0], len(lines), *counts[1:])]
    if counts[1]:
        asked = "" if choice is None else "".join(f" {key}={','.join(of)}" for key, of in choice.wanted.items())
        said.append(f"python -m kvbench.tables run {name}{asked}")
    sources: dict[str, list[str]] = {}
    for one in plans:
        for key, source in one.sources.items():
            if isinstance(value := one.settings[key], str | int) and not key.startswith("policy."):
                sources.setdefault(source, []).append(f"{key}={value}")
    said += [f"{', '.join(dict.fromkeys(words))}: {source}." for source, words in sources.items()]
    if models := sorted({one.model for one in plans} & arrangement.names().gated):
        said.append(f"The hub asks to accept a licence for {', '.join(models)}.")
    return said
