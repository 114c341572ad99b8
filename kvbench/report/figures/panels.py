"""Panels of figures: the results of one model and task, with one line for each policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.report.figures.sheet import Paper
from kvbench.report.figures.style import Look, family, palette
from kvbench.results.columns import read_table
from kvbench.results.labels import in_words
from kvbench.results.loading import load_results
from kvbench.results.result import Result, Results


@dataclass(frozen=True)
class Panel:
    """The results of one model and task, in the order of the legend: by family, name and budget."""

    model: str
    task: str
    rows: tuple[Result, ...]

    def title(self, paper: Paper, several_models: bool) -> str:
        """The task, and the model if the panels have several."""
        task = paper.task(self.task)
        return f"{task}, {self.model}" if several_models else task


def read(place: Path) -> list[Result]:
    """The runs below a folder, or in a table of `results collect`. Raises UsageError."""
    if place.suffix in (".csv", ".parquet") and place.is_file():
        return once(Results(read_table(place)))
    return once(load_results(place))


def once(rows: Iterable[Result]) -> list[Result]:
    """Rows without duplicates: the full cache is the same for compress=prompt and compress=context."""
    seen: dict[tuple[object, ...], Result] = {}
    for row in rows:
        seen.setdefault((row.model_label, row.task_label, row.line, row.budget), row)
    return list(seen.values())


def panels_of(rows: Iterable[Result]) -> list[Panel]:
    """The rows by model and task, in the order of their first appearance."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for row in rows:
        groups.setdefault((row.model_label, row.task_label), []).append(row)
    ordered = {key: sorted(of, key=lambda row: (*rank(row), row.budget or 0)) for key, of in groups.items()}
    return [Panel(model, task, tuple(members)) for (model, task), members in ordered.items()]


def rank(row: Result) -> tuple[bool, str, bool, int, str]:
    """The sort key of policies: the full cache, then by family with the plain method first, as in `style.palette`."""
    name = family(row.identity["policy"])
    return not row.is_full, name, not row.line.startswith(name), len(row.line), row.line


def several_models(panels: Iterable[Panel]) -> bool:
    """Whether titles have to name the model."""
    return len({panel.model for panel in panels}) > 1


def looks(rows: Iterable[Result]) -> Mapping[str, Look]:
    """The look of every line."""
    return palette({row.line: family(row.identity["policy"]) for row in rows})


def notes(rows: Sequence[Result], first: str = "") -> list[str]:
    """The notes below a figure: model, number of examples, schedules, and caveats."""
    sizes = sorted({row.n for row in rows if row.value is not None}) or [0]
    many = f"n = {sizes[0]}" if len(sizes) == 1 else f"n = {sizes[0]} to {sizes[-1]}, different between runs"
    seeds = sorted({row.n_seeds for row in rows if row.n_seeds})
    many += f" over {' or '.join(map(str, seeds))} seeds" if seeds else ""
    moments = sorted({row.moments for row in rows if row.when and not row.reads})
    words = ["; ".join(map(in_words, filter(None, own))) for own in moments]
    prompts: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for row in rows:
        if row.samples:
            prompts.setdefault((row.task, row.model), set()).add(row.prompts)
    several = sorted(task for (task, _), examples in prompts.items() if len(examples) > 1)
    mixed = sorted({f"{row.line} on {row.task} ({row.mixed})" for row in rows if row.mixed})
    failed = [f"{c.line} {c.budget or ''} on {c.task} ({c.n_failed} of {c.n})" for c in rows if c.n_failed]
    found = [f"Model: {', '.join(sorted({row.model for row in rows}))}. {many}. {first}".rstrip()]
    for title, values in (
        ("Schedule: ", words if len(words) == 1 else []),
        ("Different schedules, which are not comparable: ", [" | ".join(words)] if len(words) > 1 else []),
        ("Different examples: ", several),
        ("Versions mixed within a run: ", mixed),
        ("Not drawn, because examples failed: ", failed),
    ):
        if values:
            found.append(f"{title}{'; '.join(values)}.")
    return found
