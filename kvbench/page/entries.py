"""Runs as the page shows them: the words of a row, the line it belongs to, the number it is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.analysis.metrics import by_value
from kvbench.identity.labels import briefly, budget_order, evicts, keeps_all, natural, usual
from kvbench.report.figures.style import BASELINE, Look, family, palette
from kvbench.report.records import RunRecord, comparable, labelled, with_baselines

NOTHING = "–"


@dataclass(frozen=True, eq=False)
class Entry:
    """One row: a finished run, or those of its examples that belong to one task.

    policy: its name with the fields that tell it apart. line: the same with its schedule where that is not the usual
    one, unique among entries that differ in more than model, task and budget. schedule: when the prompt is compressed,
    decode: `evict` or `grow`, both "" where nothing is evicted.
    """

    number: int
    run: RunRecord
    policy: str
    line: str
    schedule: str
    decode: str
    task: str

    @property
    def model(self) -> str:
        """As tables name it."""
        return self.run.names["model"]

    @property
    def budget(self) -> int | float | None:
        """Tokens per KV head and layer, or share of the prompt; None where nothing is evicted."""
        budget: int | float | None = self.run.identity["budget"]
        return budget

    @property
    def budget_words(self) -> str:
        """The budget as a filter and a table show it."""
        return budget_words(self.budget)

    @property
    def is_full(self) -> bool:
        """Whether the full cache ran."""
        return keeps_all(self.run.identity)

    @property
    def when(self) -> str:
        """Schedule and decoding rule: "blocks of 128, evict"."""
        return ", ".join(filter(None, (self.schedule, self.decode)))

    @property
    def reads(self) -> bool:
        """Whether given texts were scored: then it is judged by its NLL, and lower is better."""
        return self.run.metrics["likelihood"] is not None

    @property
    def value(self) -> float | None:
        """Mean score, or NLL in nats per token; None where an example failed."""
        found: float | None = self._numbers["nll" if self.reads else "score"]
        return found

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of `value`."""
        name = "nll" if self.reads else "score"
        low, high = self._numbers.get(f"{name}_low"), self._numbers.get(f"{name}_high")
        return None if low is None or high is None else (low, high)

    @property
    def used_bytes(self) -> float | None:
        """Mean bytes per example in use at the end of the answer, without spare ones."""
        held: float | None = self.run.metrics["cache_bytes"]
        return held

    @property
    def examples(self) -> tuple[str, ...]:
        """Hashes of the prompts, in order."""
        return tuple(sample.prompt_hash for sample in self.run.samples)

    @property
    def _numbers(self) -> Mapping[str, Any]:
        numbers: Mapping[str, Any] = self.run.metrics["likelihood"] if self.reads else self.run.metrics
        return numbers

    @property
    def setting(self) -> tuple[str, ...]:
        """What two entries share that are compared example by example: model, dtype, task, seed, generation."""
        return (*comparable(self.run), self.task)


def budget_words(budget: int | float | None) -> str:
    """128, 20%, or a dash."""
    if budget is None:
        return NOTHING
    return f"{100 * budget:g}%" if isinstance(budget, float) and budget < 1 else f"{budget:g}"


def entries(runs: Sequence[RunRecord]) -> list[Entry]:
    """Runs as rows, each once: by model, task, budget, and policies that score alike beside each other."""
    unique = with_baselines(labelled(list({run.run_id: run for run in runs}.values())))
    timed = [(_when(run), run) for run in unique]
    most_have = usual([when for when, _ in timed if when[0]])
    rows = []
    for when, run in timed:
        name = run.names["policy"].partition(" (")[0]
        extra = " ".join(f"{key}={value}" for key, value in run.differs.items())
        name = f"{name} {extra}".strip()
        other = [own for own, most in zip(when, most_have, strict=True) if own not in ("", most)]
        line = f"{name} ({', '.join(other)})" if other else name
        rows.append((run, name, line, *when))
    rows.sort(key=lambda row: _place(row[0], row[2]))
    return [Entry(i, *row, task=row[0].names["task"]) for i, row in enumerate(rows)]


def _place(run: RunRecord, line: str) -> tuple[object, ...]:
    family_name = family(run.identity["policy"])
    names = natural(run.names["model"]), natural(run.names["task"])
    return (*names, budget_order(run.identity["budget"]), family_name != BASELINE, family_name, len(line), line)


def _when(run: RunRecord) -> tuple[str, str]:
    """When the prompt is compressed, and what decoding does; "" for what evicts nothing."""
    if not evicts(run.identity):
        return "", ""
    if run.naming is not None and run.naming.reads:
        return run.naming.reads, ""
    return briefly(run.identity), str(run.identity["policy"]["schedule"]["decode"])


def by_task(all_entries: Iterable[Entry]) -> list[Entry]:
    """The entries, those whose examples are of several tasks taken apart; numbers stay those of the whole."""
    found = []
    for entry in all_entries:
        if len(by_value(entry.run.samples, "task")) < 2:
            found.append(entry)
            continue
        for part in entry.run.parts("task"):
            task = f"{entry.task}: {part.subset.partition('=')[2]}"
            words = (entry.number, part, entry.policy, entry.line, entry.schedule, entry.decode)
            found.append(Entry(*words, task=task))
    return found


def looks(all_entries: Iterable[Entry]) -> dict[str, Look]:
    """Colour, marker and dash of every line."""
    return palette({entry.line: family(entry.run.identity["policy"]) for entry in all_entries})
