"""What was run: models with their weights, tasks with their examples, code, versions, hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.analysis.result import Result
from kvbench.identity.labels import flat
from kvbench.page.caveats import hardware

Fact = tuple[str, str]


@dataclass(frozen=True)
class About:
    """Numbers for the head of the page, and facts under their headings."""

    counts: tuple[tuple[str, str], ...]
    models: tuple[tuple[Fact, ...], ...]
    tasks: tuple[tuple[str, ...], ...]
    policies: tuple[Fact, ...]
    environment: tuple[Fact, ...]


TASK_COLUMNS = ("task", "model", "examples", "prompt tokens", "seed", "runs")


def about(entries: Sequence[Result]) -> About:
    """Everything that a reader needs to run it again."""
    policies = _policies(entries)
    samples = sum(len(entry.samples) for entry in entries)
    several = (
        (len(entries), "run", "runs"),
        (len({e.model for e in entries}), "model", "models"),
        (len({e.task for e in entries}), "task", "tasks"),
        (len({e.name for e in entries}), "policy", "policies"),
        (samples, "answer", "answers"),
    )
    counts = tuple((one if number == 1 else many, f"{number:,}") for number, one, many in several)
    return About(counts, tuple(_models(entries)), tuple(_tasks(entries)), policies, _environment(entries))


def _models(entries: Sequence[Result]) -> Iterable[tuple[Fact, ...]]:
    known: dict[tuple[Fact, ...], None] = {}
    for entry in entries:
        identity = entry.identity
        generation = identity["generation"]
        cut = generation.get("max_prompt_tokens")
        facts = [("model", entry.model), *((k.replace("_", " "), str(v)) for k, v in identity["model"].items())]
        facts += [("dtype", identity["dtype"]), ("decoding", str(generation["decoding"]))]
        facts += [("prompts cut to", f"{cut:,} tokens")] if cut else []
        known[tuple(facts)] = None
    return known


def _tasks(entries: Sequence[Result]) -> Iterable[tuple[str, ...]]:
    settings: dict[tuple[str, ...], list[Result]] = {}
    for entry in entries:
        settings.setdefault(entry.setting, []).append(entry)
    for members in settings.values():
        first = members[0]
        lengths = [s.prompt_tokens for s in max((e.samples for e in members), key=len)]
        sizes, tokens = _range([e.n for e in members]), _range(lengths)
        yield first.task, first.model, sizes, tokens, str(first.identity["seed"]), str(len(members))


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _policies(entries: Sequence[Result]) -> tuple[Fact, ...]:
    """Every policy with all its fields, those of its schedule with them."""
    found: dict[str, str] = {}
    for entry in sorted(entries, key=lambda e: (not e.is_full, e.line)):
        fields = flat({k: v for k, v in entry.identity["policy"].items() if k != "class"})
        found.setdefault(entry.line, ", ".join(f"{key}={value}" for key, value in fields.items() if value is not None))
    return tuple(found.items())


def _environment(entries: Sequence[Result]) -> tuple[Fact, ...]:
    """Versions and hardware: one value if all runs share it, else every value."""
    places = [entry.environment for entry in entries]
    packages = sorted({name for place in places for name, version in place["packages"].items() if version})
    found = {
        "kvbench revision": [place["kvbench_revision"] or "unknown" for place in places],
        "hardware": map(hardware, entries),
        "platform": [place["hardware"]["platform"] for place in places],
        "python": [place["python"] for place in places],
        **{name: [place["packages"].get(name) for place in places] for name in packages},
    }
    return tuple((name, "; ".join(sorted(set(map(str, values))))) for name, values in found.items())
