"""What a reader must know before believing a comparison: worst first, each with what it is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.analysis.result import Result
from kvbench.analysis.statistics import FEWEST
from kvbench.identity.environment import machine
from kvbench.page.ranking import EFFECT, Standing, groups, half_width, needed
from kvbench.page.rows import budget_words
from kvbench.records.samples import FILE_NAME
from kvbench.report.table import unlike

LEVELS = BROKEN, CARE, NOTE = "broken", "care", "note"
MEMORY = 1.1  # times as many bytes at one budget: beyond this it is said


@dataclass(frozen=True)
class Caveat:
    """A warning: `broken` (a number is missing), `care` (compare with care) or `note`; what, and where, a line each."""

    level: str
    title: str
    text: str
    where: tuple[str, ...] = ()


def caveats(
    entries: Sequence[Result], standings: Mapping[Result, Standing], unfinished: Sequence[Path]
) -> list[Caveat]:
    """Every warning about these runs, the worst first."""
    found = [
        _failed(entries),
        _unfinished(unfinished),
        _mixed_versions(entries),
        *_schedules(entries),
        _examples(entries),
        _computed_by(entries),
        _too_wide(entries, standings),
        _nothing_evicted(entries),
        _memory(entries),
        _no_baseline(entries),
        _hardware(entries),
    ]
    return sorted((one for one in found if one.where), key=lambda caveat: LEVELS.index(caveat.level))


def unfinished(folder: Path) -> list[Path]:
    """Folders of runs that were begun and not finished."""
    found = (path.parent for path in sorted(folder.rglob(FILE_NAME)))
    return [path for path in found if not (path / "metrics.json").exists()]


def called(entry: Result) -> str:
    """An entry in words: policy, budget, task, and the model."""
    at = "" if entry.budget is None else f" at {budget_words(entry.budget)}"
    return f"{entry.name}{at} on {entry.task} ({entry.model})"


def _failed(entries: Sequence[Result]) -> Caveat:
    failed = {entry: [s for s in entry.samples if s.error is not None] for entry in entries if entry.n_failed}
    where = (
        f"{called(entry)}: {entry.n_failed} of {entry.n} examples; example {lost[0].index}: {lost[0].error}"
        for entry, lost in failed.items()
    )
    broke = any("BudgetError" in (sample.error or "") for lost in failed.values() for sample in lost)
    title = f"{_count(len(failed), 'run')} {'broke their budget' if broke else 'failed'}"
    text = "They have no score: a mean over the examples that went well would flatter them."
    return Caveat(BROKEN, title, text, tuple(where))


def _unfinished(folders: Sequence[Path]) -> Caveat:
    text = "Left out of everything below. The command that began them continues with the next example."
    return Caveat(BROKEN, f"{_count(len(folders), 'run')} not finished", text, tuple(path.name for path in folders))


def _mixed_versions(entries: Sequence[Result]) -> Caveat:
    where = tuple(f"{called(entry)}: {entry.mixed}" for entry in entries if entry.mixed)
    return Caveat(CARE, "Versions mixed within a run", "Such a run measures neither of the two.", where)


def _schedules(entries: Sequence[Result]) -> Iterator[Caveat]:
    """One caveat for all comparisons that mix the same moments of eviction."""
    said: dict[tuple[str, ...], list[str]] = {}
    for members in _by_setting(entries):
        if sentences := tuple(unlike(members)):
            said.setdefault(sentences, []).append(f"{members[0].task} ({members[0].model})")
    for sentences, where in said.items():
        titles = [title for word, title in _MIXED.items() if any(s.startswith(word) for s in sentences)]
        text = " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)
        yield Caveat(CARE, f"{' and '.join(titles)} mixed in one comparison".capitalize(), text, tuple(where))


_MIXED = {"what is compressed": "prompts and contexts", "schedules": "schedules", "decoding": "rules of decoding"}


def _examples(entries: Sequence[Result]) -> Caveat:
    where = []
    for members in _by_setting(entries):
        sets = {tuple(sample.prompt_hash for sample in entry.samples) for entry in members}
        if len(sets) > 1:
            sizes = sorted(map(len, sets))
            many = f"{sizes[0]} to {sizes[-1]}" if sizes[0] < sizes[-1] else f"{sizes[0]} others each"
            where.append(f"{members[0].task} ({members[0].model}): {many} examples")
    text = "Differences are taken over the examples that both have; the scores themselves are not."
    return Caveat(CARE, "Not the same examples for all", text, tuple(where))


def _computed_by(entries: Sequence[Result]) -> Caveat:
    text = "Runs whose own code differs have their digest in the name; what they share may still have changed."
    where = _several(_short(str(e.environment["kvbench_revision"] or "unknown")) for e in entries)
    return Caveat(NOTE, "Computed by several revisions of kvbench", text, where)


def _short(revision: str) -> str:
    commit, plus, dirty = revision.partition("+")
    return f"{commit[:12]}{plus}{dirty}"


def _too_wide(entries: Sequence[Result], standings: Mapping[Result, Standing]) -> Caveat:
    where = []
    for members in groups(entries).values():
        tied = [entry for entry in members if standings[entry].place == "tied"]
        if not tied:
            continue
        first = members[0]
        about = [first.task, first.model]
        about += [f"budget {budget_words(first.budget)}"] if first.budget is not None else []
        examples = min(entry.n for entry in members)
        said = f"{', '.join(about)}, {first.when or 'nothing evicted'}: {len(tied)} of {len(members) - 1} others"
        said += (
            f" cannot be told from the best with {_count(examples, 'example')} (±{half_width(members):.2f} on average)"
        )
        if examples < FEWEST:
            said += f"; nothing is claimed below {FEWEST} examples"
        enough = max((needed(standings[entry], len(members) - 1) or 0 for entry in tied), default=0)
        if enough > examples and not first.reads:
            said += f"; a difference of {EFFECT} takes about {enough:,} examples"
        where.append(said)
    text = "Equal is not shown either: there are too few examples to tell."
    return Caveat(CARE, "Intervals too wide to tell policies apart", text, tuple(where))


def _memory(entries: Sequence[Result]) -> Caveat:
    where = []
    for members in groups(entries).values():
        held = {entry: entry.cache_bytes for entry in members if entry.cache_bytes and entry.budget is not None}
        if held and max(held.values()) > MEMORY * min(held.values()):
            least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
            times = held[most] / held[least]
            said = f"{most.task} ({most.model}) at {budget_words(most.budget)}, {most.when}"
            where.append(f"{said}: {most.name} holds {times:.2f}x the bytes of {least.name}")
    text = "A budget counts tokens. Statistics, positions, growth while decoding and stores make bytes of them."
    return Caveat(NOTE, "The same budget is not the same memory", text, tuple(where))


def _nothing_evicted(entries: Sequence[Result]) -> Caveat:
    idle = tuple(called(e) for e in entries if e.evicts and e.evicted_share == 0)
    text = "The budget is above every prompt, so that this is the full cache under another name."
    return Caveat(CARE, "Nothing was evicted", text, idle)


def _no_baseline(entries: Sequence[Result]) -> Caveat:
    alone = dict.fromkeys(f"{e.task} ({e.model})" for e in entries if not e.is_full and e.baseline is None)
    text = "No cost of compression can be told there: run policy=full on the same examples."
    return Caveat(NOTE, "The full cache was not run", text, tuple(alone))


def _hardware(entries: Sequence[Result]) -> Caveat:
    where = _several(map(hardware, entries))
    return Caveat(NOTE, "Several machines or numbers of threads", "Seconds do not compare between them.", where)


def hardware(entry: Result) -> str:
    """Where an entry was computed."""
    return machine(entry.environment)


def _several(values: Iterable[str]) -> tuple[str, ...]:
    """How many runs have each value; nothing where all have the same."""
    counts = Counter(values)
    return tuple(f"{name}: {_count(many, 'run')}" for name, many in counts.items()) if len(counts) > 1 else ()


def _by_setting(entries: Iterable[Result]) -> list[list[Result]]:
    """Entries that are compared example by example, of any budget and schedule."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for entry in entries:
        found.setdefault(entry.setting, []).append(entry)
    return list(found.values())


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}{'' if number == 1 else 's'}"
