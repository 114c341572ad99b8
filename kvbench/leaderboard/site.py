"""The static page of leaderboards, the same numbers as a table, and the samples that every number links to."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from math import log2
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvbench.analysis.result import Result
from kvbench.identity.environment import machine
from kvbench.leaderboard.asked import Submission
from kvbench.leaderboard.board import Board, Entry
from kvbench.page.libraries import libraries
from kvbench.page.rows import budget_words
from kvbench.page.tables import MARKS, amount
from kvbench.records.files import write_atomically

PAGE, TABLE, SAMPLES = "index.html", "leaderboard.csv", "samples"
OVERALL = "mean"
_KEPT = ("samples.jsonl", "config.yaml", "environment.json", "metrics.json")
WIDTH, HEIGHT, LEFT, BELOW = 900, 300, 46, 34  # of the picture, and its margins
_LABEL = 95, 13  # room that a name takes


@dataclass(frozen=True)
class Point:
    """An entry in the picture of scores against bytes; labelled: its name has room, on the left where it ends there."""

    entry: Entry
    x: float
    y: float
    labelled: bool
    left: bool


@dataclass(frozen=True)
class Picture:
    """Scores against bytes held, which double from tick to tick."""

    points: tuple[Point, ...]
    ticks: tuple[tuple[float, str], ...]


def write_site(out: Path, boards: Sequence[Board], runs: Sequence[tuple[Submission, Result]]) -> None:
    """Write page, table and samples into a folder. Raises OSError."""
    for submission, run in runs:
        place = out / _place(submission, run)
        place.mkdir(parents=True, exist_ok=True)
        for name in _KEPT:
            shutil.copyfile(run.folder / name, place / name)
    for submission in dict.fromkeys(submission for submission, _ in runs):
        told = f"experiment: {submission.experiment}\nsubmitter: {submission.submitter!r}\n"
        write_atomically(out / SAMPLES / submission.name / "submission.yaml", told)
    write_atomically(out / TABLE, table(boards))
    write_atomically(out / PAGE, page(boards, runs))


def page(boards: Sequence[Board], runs: Sequence[tuple[Submission, Result]]) -> str:
    """The page: it asks no network for anything, and says so to the browser."""
    environment = Environment(
        loader=PackageLoader("kvbench.leaderboard", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"budget": budget_words, "amount": amount}
    return environment.get_template("leaderboard.html").render(
        boards=[(board, picture(board)) for board in boards],
        submissions=[_about(s, [r for o, r in runs if o == s]) for s in dict.fromkeys(s for s, _ in runs)],
        several=len({submission for submission, _ in runs}) > 1,
        samples=_place,
        marks={**MARKS, "worse": "", "": "reference"},
        size=(WIDTH, HEIGHT, LEFT, BELOW),
        libraries=libraries(),
        css=Markup((resources.files("kvbench.page") / "page.css").read_text(encoding="utf-8")),
    )


def picture(board: Board) -> Picture:
    """Where the entries of a board lie, the full cache as well."""
    sizes = [log2(entry.cache_bytes) for entry in board.entries]
    low, high = min(sizes) - 0.25, max(sizes) + 0.5
    across = (WIDTH - LEFT) / (high - low)
    points, labels = [], list[tuple[float, float]]()
    for entry, size in zip(board.entries, sizes, strict=True):
        x, y = LEFT + (size - low) * across, (HEIGHT - BELOW) * (1 - entry.value) * 0.94 + 8
        free = all(abs(x - u) > _LABEL[0] or abs(y - v) > _LABEL[1] for u, v in labels)
        labelled = free and entry.place in ("best", "")
        labels += [(x, y)] * labelled
        points.append(Point(entry, round(x, 1), round(y, 1), labelled, left=x > WIDTH - _LABEL[0]))
    whole = range(int(low) + 1, int(high) + 1)
    return Picture(tuple(points), tuple((round(LEFT + (n - low) * across, 1), amount(2.0**n)) for n in whole))


def table(boards: Sequence[Board]) -> str:
    """A row for each entry over all tasks, and for each of its tasks."""
    file = io.StringIO()
    rows = [row for board in boards for row in _rows(board)]
    writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _rows(board: Board) -> Iterator[dict[str, object]]:
    for entry in board.entries:
        first = entry.first
        who = {
            "experiment": board.experiment,
            "model": board.model,
            "submitter": entry.submission.submitter,
            "policy": first.name,
            "budget": first.budget,
        }
        for task, one in [(OVERALL, entry), *entry.alone.items()]:
            yield {
                **who,
                "task": task,
                "n": sum(row.n for row in one.results.values()),
                "score": f"{one.value:.4f}",
                "low": f"{one.ends[0]:.4f}",
                "high": f"{one.ends[1]:.4f}",
                "cache_bytes": round(one.cache_bytes),
                "cache_share": f"{one.share:.4f}",
                "place": one.place,
                "rival": _named(one.rival),
            }


def _named(entry: Entry | None) -> str:
    if entry is None:
        return ""
    return entry.first.name + ("" if entry.first.budget is None else f" at {budget_words(entry.first.budget)}")


def _place(submission: Submission, run: Result) -> Path:
    """Where the samples of a run lie below the page."""
    return Path(SAMPLES) / submission.name / run.run_id


def _about(submission: Submission, runs: Sequence[Result]) -> dict[str, str]:
    """Who ran it on what."""
    places = [run.environment for run in runs]
    packages = ("torch", "transformers", "kvbench")
    versions = {f"{name} {place['packages'].get(name)}" for place in places for name in packages}
    return {
        "submission": submission.name,
        "submitter": submission.submitter,
        "leaderboard": submission.experiment,
        "runs": f"{len(runs):,}",
        "answers": f"{sum(run.n for run in runs):,}",
        "hardware": "; ".join(sorted({machine(place, threads=False) for place in places})),
        "versions": ", ".join(sorted(versions)),
        "revision": "; ".join(sorted({str(place["kvbench_revision"])[:12] for place in places})),
    }
