"""What a protocol leaves behind: a table on the screen, and one JSON, one CSV and one picture in the folder."""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from kvbench.records.files import write_atomically, write_json
from kvbench.report.figures.curves import Curve, Dot, Picture, as_json
from kvbench.report.grid import Block, Cell, Grid
from kvbench.report.grid import Row as GridRow
from kvbench.report.plain_text import text
from kvbench.terminal.folding import fold, terminal_width
from kvbench.tools.bench.bench import Bench, BenchProtocol, Row
from kvbench.tools.bench.journal import Record
from kvbench.tools.bench.machine import device_line, machine
from kvbench.tools.bench.settings import ABOUT

GIGA = 1e9


def header(bench: Bench, protocol: BenchProtocol) -> list[str]:
    """What every figure of the protocol hangs on, line by line."""
    s = bench.settings
    lines = [f"{protocol.name}: {ABOUT[protocol.name]}"]
    if bench.usual_model:
        lines.append(bench.built.said)
    lines += [
        f"{device_line(bench.device)}; a copy moves {bench.bandwidth / GIGA:.0f} GB/s",
        f"scale={s.scale}" + (" (sizes as published)" if s.scale == 1 else ": sizes divided by it where they can be"),
    ]
    return lines + protocol.remarks(bench)


def write(bench: Bench, protocol: BenchProtocol, found: Mapping[str, Record], lines: list[str]) -> list[Row]:
    """Write <out>/<protocol>.json, .csv and .svg of what was measured so far; returns the rows."""
    rows = protocol.rows(bench, found)
    base = bench.settings.out / protocol.name
    where = machine(bench.device)
    picture = protocol.picture(bench, rows)
    content: dict[str, Any] = {"header": lines, "machine": where, "rows": [asdict(row) for row in rows]}
    content |= {"cells": list(found.values()), **as_json(picture)}
    write_json(base.with_suffix(".json"), content)
    write_atomically(base.with_suffix(".csv"), table_text(rows, stamp(bench, where, found)))
    if picture:
        _draw(base.with_suffix(".svg"), picture, lines)
    return rows


def _draw(path: Path, picture: Picture, lines: list[str]) -> None:
    from kvbench.report.figures import (  # here: matplotlib is a second, which only pictures have to wait for
        bench,
        style,
    )

    with style.house_style():
        style.save(bench.draw(picture, lines), path)


def curves(rows: Iterable[Row], panel: str, x_label: str, y_label: str, by: str) -> list[Curve]:
    """A line for each method. by: the column of sizes, 1 where a row has none."""
    points: dict[str, dict[float, Row]] = {}
    for row in rows:
        if row.value is not None:
            points.setdefault(row.method, {})[float(getattr(row, by) or 1)] = row
    found = []
    for method, drawn in points.items():
        values = [row.value or 0.0 for row in drawn.values()]
        low, high = ([getattr(row, side) for row in drawn.values()] for side in ("p20", "p80"))
        found.append(Curve(panel, x_label, y_label, method, list(drawn), values, low, high))
    return found


def dots_of(rows: Iterable[Row], place: Callable[[Row, float], float]) -> list[Dot]:
    """A dot for every row that has a figure. place: where a figure of a row stands."""
    found = []
    for row in rows:
        if row.value is not None:
            sides = sorted(place(row, side) for side in (row.p20, row.p80) if side is not None)
            low, high = sides if len(sides) == 2 else (None, None)
            found.append(Dot(row.method, place(row, row.value), low, high))
    return found


def stamp(bench: Bench, where: Mapping[str, Any], found: Mapping[str, Record]) -> dict[str, Any]:
    """The columns that every row of a CSV shares; copy_gb_per_s, revision: of what measured, all if several."""
    packages = where["packages"]
    copied = sorted({cell["copy_bytes_per_s"] for cell in found.values()}) or [bench.bandwidth]
    revisions = dict.fromkeys(cell["revision"] or "unknown" for cell in found.values())
    return {
        "hardware": device_line(bench.device),
        "copy_gb_per_s": " ".join(f"{one / GIGA:.1f}" for one in copied),
        "dtype": str(bench.built.model.dtype).removeprefix("torch.") if bench.usual_model else "",
        "torch": packages["torch"],
        "transformers": packages["transformers"],
        "triton": packages["triton"],
        "revision": " ".join(revisions),
        "scale": bench.scale,
    }


def table_text(rows: list[Row], shared: Mapping[str, Any]) -> str:
    """The CSV: the ten columns of the papers' tables, then ours."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [f.name for f in fields(Row)] + list(shared), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _plain(value) for key, value in (asdict(row) | dict(shared)).items()})
    return stream.getvalue()


def _plain(value: object) -> object:
    """Figures with six digits, nothing for what is unknown."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "budget": lambda row: "" if row.budget is None else f"{row.budget}",
    "metric": lambda row: row.metric,
    "value": lambda row: "-" if row.value is None else f"{row.value:.4g}",
    "p20 - p80": lambda row: "" if row.p20 is None or row.p80 is None else f"{row.p20:.4g} - {row.p80:.4g}",
    "of the limit": lambda row: "" if row.share_of_limit is None else f"{row.share_of_limit:.1%}",
    "bound": lambda row: row.bound + {True: ", met", False: ", missed", None: ""}[row.met],
    "note": lambda row: row.note,
}
_WORDS = ("metric", "bound", "note")
_OFTEN = 3  # rows that share a note, from which on it stands once, below the table
_KEYS = 2  # budget and metric tell the rows of a method apart


def grid(rows: Sequence[Row]) -> Grid:
    """The rows as a table: a block for each task, without columns that say nothing; notes of many rows below it."""
    tasks = {row.task: [one for one in rows if one.task == row.task] for row in rows}
    letters = _letters([row for some in tasks.values() for row in some])
    tasks = {task: [replace(row, note=letters.get(row.note, row.note)) for row in some] for task, some in tasks.items()}
    own = [row for some in tasks.values() for row in some]
    told = [name for name, of in _COLUMNS.items() if name in ("budget", "metric") or any(map(of, own))]
    blocks = (
        Block(task, tuple(GridRow(row.method, tuple(Cell(_COLUMNS[name](row)) for name in told)) for row in some))
        for task, some in tasks.items()
    )
    left = tuple(place for place, name in enumerate(told) if name in _WORDS)
    header = tuple((name,) for name in told)
    notes = tuple((letter.strip("[]"), note) for note, letter in letters.items())
    return Grid("", "", "method", header, tuple(blocks), notes, left=left, keys=_KEYS)


def _letters(rows: Sequence[Row]) -> dict[str, str]:
    """What stands for the notes of `_OFTEN` rows and more: a letter, nothing where a note is that of all rows."""
    times = Counter(row.note for row in rows if row.note)
    often = [note for note, count in times.items() if count >= _OFTEN]
    if len(often) == 1 and times[often[0]] == len(rows):
        return {often[0]: ""}
    return {note: f"[{letter}]" for note, letter in zip(often, ascii_lowercase, strict=False)}


def show(rows: Sequence[Row], title: Sequence[str]) -> None:
    """The rows on the screen, under their header; on a terminal they end where it does."""
    width = terminal_width()
    for line in title:
        sys.stdout.write(f"{line if width is None else fold(line, width)}\n")
    if rows:
        sys.stdout.write(f"\n{text(grid(rows), width)}")
