"""What stands under a picture: model, examples, schedules, intervals, and whatever makes a comparison doubtful."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.analysis.result import Result
from kvbench.identity.labels import in_words, usual


def notes(cells: Sequence[Result], intervals: str = "Bars: 95% intervals.") -> list[str]:
    """The notes of a picture, a line each: model, examples, intervals, schedules, what is missing."""
    scored = [cell for cell in cells if cell.score is not None]
    sizes = sorted({cell.n for cell in scored})
    many = (
        f"{sizes[0]} examples for every point"
        if len(sizes) == 1
        else (f"{min(sizes, default=0)} to {max(sizes, default=0)} examples for a point, not the same for all")
    )
    models = sorted({cell.model for cell in cells})
    said = f"Model: {', '.join(models)}. n = {many}. {intervals}"
    return [said.strip(), *_schedules(cells), *_others(scored), *_missing(cells)]


def _schedules(cells: Sequence[Result]) -> list[str]:
    evicting = [*{(cell.slug, cell.when): cell.moments for cell in cells if cell.when and not cell.reads}.values()]
    if not evicting:
        return []
    own = usual(evicting)
    most = f"{in_words(own[0])}; {in_words(own[1])}"
    others = sorted({name for moments in evicting for name in moments} - set(own))
    if not others:
        return [f"All that evict: {most}."]
    rest = "; ".join(f"{name}: {in_words(name)}" for name in others)
    mixed = "Mixed schedules, which are different experiments. Where a name says nothing else:"
    return [f"{mixed} {most}. {rest[0].upper()}{rest[1:]}."]


def _others(cells: Sequence[Result]) -> list[str]:
    """Where examples of one panel are not the same for all, and where versions are mixed within a run."""
    asked: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for cell in cells:
        if cell.samples:
            examples = tuple(sample.prompt_hash for sample in cell.samples)
            asked.setdefault((cell.task, cell.model), set()).add(examples)
    several = sorted(task for (task, _), examples in asked.items() if len(examples) > 1)
    said = [f"Not the same examples for all: {', '.join(several)}."] if several else []
    mixed = sorted({f"{cell.line} on {cell.task} ({cell.mixed})" for cell in cells if cell.mixed})
    return [*said, *([f"Versions mixed within a run: {'; '.join(mixed)}."] if mixed else [])]


def _missing(cells: Sequence[Result]) -> list[str]:
    lost = []
    for cell in cells:
        if cell.score is None and cell.n_failed:
            at = "" if cell.budget is None else f" at {cell.budget:g}"
            lost.append(f"{cell.line}{at} on {cell.task} ({cell.n_failed} of {cell.n})")
    return [f"Not drawn, because examples failed: {', '.join(lost)}."] if lost else []
