"""Tables for people: at the end of a run or a sweep, and as files beside the tidy table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.analysis.load import Results
from kvbench.analysis.result import Result
from kvbench.identity.labels import in_words, parted
from kvbench.report.grid import Block, Cell, Grid, Row
from kvbench.report.plain_text import text
from kvbench.terminal.folding import terminal_width

NONE = "-"
POLICY, SUBSET, BUDGET, EXAMPLES, STATE, WHEN = "policy", "subset", "budget", "n", "state", "when"
WIDE = 100  # letters of a line at most


@dataclass(frozen=True)
class _Number:
    """A column of numbers: its title, and its text for a result."""

    title: str
    value: Callable[[Result], str]


@dataclass(frozen=True)
class Line:
    """A result and the words that name it, by column."""

    row: Result
    words: Mapping[str, str]


def print_table(rows: Iterable[Result]) -> None:
    """Print one row per run on stdout, in the order given.

    Columns that do not fit into 100 letters, or into a narrower terminal, stand in a second table below.
    """
    found = Results(rows, in_order=False)
    width = min(WIDE, terminal_width() or WIDE)
    sys.stdout.write("\n".join(text(grid, width) for grid in results_grids(found)))
    if len(found) == 1:
        sys.stdout.write(f"results: {found[0].folder}\n")


def results_grids(rows: Sequence[Result]) -> list[Grid]:
    """The rows as a table; those that scored given texts in one of their own, for NLL and perplexity are no scores.

    What is the same in all rows is said once, above.
    """
    lines, below = lines_of(rows)
    kinds = [[line for line in lines if line.row.reads == reads] for reads in (False, True)]
    if not any(line.row.finished for line in kinds[0]):
        kinds = [[*kinds[1], *kinds[0]]]
    found = [_grid(kind) for kind in kinds if kind]
    found[-1] = replace(found[-1], notes=(*found[-1].notes, *(("", note) for note in [*below, *notes(rows)])))
    return found


def lines_of(rows: Sequence[Result]) -> tuple[list[Line], list[str]]:
    """Rows with the words that name them, and a sentence on when they evict if it is the same for all."""
    told = list(dict.fromkeys(name for row in rows for name in row.differs))
    lines = [Line(row, _words(row, told)) for row in rows]
    whens = sorted(_whens(lines))
    return lines, [f"when: {'; '.join(map(in_words, whens[0].split(', ')))}"] if len(whens) == 1 else []


def _whens(lines: Sequence[Line]) -> set[str]:
    """The schedules and decoding rules of the rows that evict."""
    return {line.words[WHEN] for line in lines} - {""}


def in_blocks(lines: Sequence[Line], names: Sequence[str]) -> dict[str, list[Line]]:
    """Rows under what they share: values of `names`, and when they evict, where rows differ in that.

    What evicts nothing stands first: the full cache is the reference of all that follow.
    """
    mixed = len(_whens(lines)) > 1
    keys = [(tuple(line.words[name] for name in names), line.words[WHEN] if mixed else "") for line in lines]
    blocks: dict[str, list[Line]] = {}
    for place in dict.fromkeys(place for place, _ in keys):
        for evicting in dict.fromkeys(["", *(evicting for _, evicting in keys)]):
            members = [line for line, key in zip(lines, keys, strict=True) if key == (place, evicting)]
            if members:
                blocks["; ".join(filter(None, (", ".join(place), evicting)))] = members
    return blocks


def _words(row: Result, told: Sequence[str]) -> dict[str, str]:
    return {
        "model": row.model,
        POLICY: parted(row.policy)[0] if row.when else row.policy,
        "task": row.task,
        WHEN: row.when,
        SUBSET: row.subset or "all",
        **{name: row.differs.get(name, NONE) for name in told},
        BUDGET: NONE if row.budget is None else str(row.budget),
        EXAMPLES: str(row.n),
        STATE: row.state,
    }


def _grid(lines: Sequence[Line]) -> Grid:
    """Rows of one kind. Columns of words and budgets stand only where rows differ; numbers always.

    Models and tasks are titles of blocks instead, where blocks have two rows or more on average.
    """
    rows = [line.row for line in lines if line.row.finished]
    names = [name for name in lines[0].words if name not in (POLICY, WHEN)]
    same = {name for name in names if len({line.words[name] for line in lines}) == 1}
    if len(lines) == 1:
        same.discard(BUDGET)
    titles = [name for name in ("model", "task") if name not in same]
    blocks = in_blocks(lines, titles)
    if 2 * len(blocks) > len(lines):
        titles = []
        blocks = in_blocks(lines, titles)
    shown = [name for name in names if name not in same and name not in titles]
    shown.sort(key=lambda name: name in (BUDGET, EXAMPLES))
    numbers = list(_numbers(rows))
    return Grid(
        name="",
        title=shared(lines[0].words, same),
        corner=POLICY,
        header=tuple((title,) for title in [*shown, *(number.title for number in numbers)]),
        blocks=tuple(Block(t, tuple(_row(x, shown, numbers) for x in members)) for t, members in blocks.items()),
        notes=tuple(("", note) for note in _legend(rows)),
        left=tuple(i for i, name in enumerate(shown) if name not in (BUDGET, EXAMPLES)),
        keys=len(shown),
    )


def _row(line: Line, shown: Sequence[str], numbers: Sequence[_Number]) -> Row:
    cells = [*(line.words[n] for n in shown), *(x.value(line.row) if line.row.finished else "" for x in numbers)]
    return Row(line.words[POLICY], tuple(Cell(words) for words in cells))


def shared(words: Mapping[str, str], same: set[str]) -> str:
    """The fields that all rows share, as a heading."""
    silent = {EXAMPLES, STATE, WHEN} | ({SUBSET} if words[SUBSET] == "all" else set())
    told = [f"{name} {value}" for name, value in words.items() if name in same - silent]
    many = [f"{words[EXAMPLES]} example{'s' * (words[EXAMPLES] != '1')}"] if EXAMPLES in same else []
    return ", ".join([*told, *many])


def _numbers(rows: Sequence[Result]) -> Iterator[_Number]:
    """The columns of numbers that some of the rows have; vs full only where there is a full cache to compare with."""
    reads = any(row.reads for row in rows)
    compares = any(row.baseline is not None for row in rows)
    yield from (x for x in (_READ if reads else _SCORED) if compares or "vs full" not in x.title)
    chooses = any(row.read_tokens is not None for row in rows)
    yield _KEPT
    yield from _READS[:1] if chooses else []
    yield from _READ_HELD if reads else []
    yield from _BYTES[:1]
    yield from _READS[1:] if chooses else []
    yield from _BYTES[1:]
    yield from _STATES if any(row.state_bytes is not None for row in rows) else []
    yield from _DEVICE if any(row.device_peak_bytes is not None for row in rows) else []
    yield from _PASSED if any(row.pre_pass_tokens is not None for row in rows) else []
    yield from _CODED if any(row.quantises for row in rows) else []
    if not all(row.n_shared for row in rows):
        yield from (seconds for seconds in _SECONDS if any(seconds.value(row) != NONE for row in rows))


def _legend(rows: Sequence[Result]) -> list[str]:
    """The legend of the table."""
    reads = any(row.reads for row in rows)
    what = "text" if reads else "example"
    told = ["m: tokens scored between two evictions" if reads else "score: mean, 1 is best"]
    if any(row.baseline is not None for row in rows):
        told.append(f"vs full: on the same {what}s, * where the 95% interval leaves out 0")
    budget = "budget: tokens a KV head may keep (below 1: share of the prompt)"
    held = [f"{budget}; kept, cache: held at the end"]
    if any(row.read_tokens is not None for row in rows):
        held.append("budget of a policy that keeps all: tokens a decoded one may read; read: by the last one")
    return ["; ".join(told), *held]


def notes(rows: Sequence[Result]) -> list[str]:
    """Warnings about comparing the rows, a line each."""
    found = [f"mixed versions in {row.run_id}: {row.mixed}" for row in rows if row.mixed]
    if any(row.n_shared for row in rows):
        found.append("Times are not shown for batched runs. Use engine.rows=1 to time each run alone.")
    return found + unlike([row for row in rows if row.finished])


def unlike(all_rows: Sequence[Result]) -> list[str]:
    """Sentences for policies that evict at other moments: they are other experiments, not only other policies."""
    rows = [row for row in all_rows if row.evicts and row.naming.reads is None]
    found = []
    modes = sorted({row.compress for row in rows})
    if len(modes) > 1:
        found.append(
            f"what is compressed differs ({', '.join(modes)}): a context is compressed before its question was seen, a "
            "prompt with it; compare rows of one kind (compress=)"
        )
    schedules = {row.schedule for row in rows if row.schedule}
    if len(schedules) > 1:
        prompts = "what evicts at the end of the prompt has seen the question, what evicts in blocks has not"
        contexts = "what evicts in blocks decides before it has read the rest of the context"
        found.append(
            f"schedules differ ({', '.join(sorted(schedules))}): {contexts if modes == ['context'] else prompts}; "
            "compare rows of one schedule (schedule=)"
        )
    decodes = {row.decode for row in rows if row.decode}
    if len(decodes) > 1:
        grows = "what grows keeps every new token beside its budget"
        often = "what evicts every k holds up to k tokens beyond it"
        found.append(
            f"decoding differs ({', '.join(sorted(decodes))}): {grows if 'grow' in decodes else often}; compare rows "
            "of one rule (decode=)"
        )
    return found


def measure(row: Result) -> str:
    """A run's score, or the NLL of the texts it was given, with its 95% interval."""
    if row.value is None:
        return f"none: {row.n_failed} failed"
    digits = 4 if row.reads else 3
    ends = "one text" if row.ends is None else "-".join(f"{end:.{digits - 1}f}" for end in row.ends)
    return f"{row.value:.{digits}f} ({ends})"


def _against(row: Result) -> str:
    """Mean difference to the baseline over the examples both have; "*" where the two can be told apart."""
    found, digits = row.difference, 4 if row.reads else 3
    if found is None:
        return f"{row.gap.nll:+.4f} (one text) " if row.gap else ""
    star = "*" if found.claims else " "
    return f"{found.mean:+.{digits}f} ({found.low:+.{digits - 1}f}..{found.high:+.{digits - 1}f}){star}"


def _most_kept(row: Result) -> str:
    """The most tokens a KV head of any layer held while tokens were scored."""
    return NONE if row.max_kept_tokens is None else str(max(map(max, row.max_kept_tokens)))


def _number(title: str, name: str, how: str, unit: str = "", scale: float = 1) -> _Number:
    """A column of the field `name`; seconds of batched runs would be those of all."""

    def value(row: Result) -> str:
        found = getattr(row, name)
        if title in _TIMED and row.n_shared:
            return "shared"
        return NONE if found is None else f"{found * scale:{how}}{unit}"

    return _Number(title, value)


def _read(title: str, name: str, held: str, how: str) -> _Number:
    """A column of what a decoded token reads: what does not choose reads all that it holds."""
    scale = 2**-20 if "MiB" in title else 1

    def value(row: Result) -> str:
        found = getattr(row, name)
        found = getattr(row, held) if found is None else found
        return NONE if found is None else f"{found * scale:{how}}"

    return _Number(title, value)


def _percent(row: Result) -> str:
    share = row.cache_share
    return NONE if share is None else f"{100 * share:.{0 if share > 0.9995 else 1}f}%"


def _ppl_gap(row: Result) -> str:
    return "" if row.gap is None else f"{row.gap.perplexity:+.4g}"


_TIMED = ("prefill s", "decode s", "ms/token")
_SCORED = [_Number("score (95% CI)", measure), _Number("vs full (95% CI)", _against)]
_READ = [
    _number("tokens", "scored_tokens", "d"),
    _Number("NLL, lower is better (95% CI)", measure),
    _Number("vs full (95% CI)", _against),
    _number("PPL", "perplexity", ".4g"),
    _Number("PPL vs full", _ppl_gap),
]
_READ_HELD = [_Number("most kept", _most_kept)]
_KEPT = _number("kept/KV head", "kept_tokens", ".1f")
_BYTES = [
    _number("cache MiB", "cache_bytes", ".3f", scale=2**-20),
    _Number("of full", _percent),
    _number("spare MiB", "spare_bytes", ".3f", scale=2**-20),
    _number("peak MiB", "peak_bytes", ".3f", scale=2**-20),
]
_STATES = [_number("state MiB", "state_bytes", ".3f", scale=2**-20)]
_DEVICE = [_number("device peak MiB", "device_peak_bytes", ".0f", scale=2**-20)]
_READS = [
    _read("read/KV head", "read_tokens", "kept_tokens", ".1f"),
    _read("MiB read/token", "read_bytes", "cache_bytes", ".3f"),
]
_PASSED = [_number("pre-pass tokens", "pre_pass_tokens", ".1f")]
_CODED = [_number("bits/number", "bits_per_number", ".2f"), _number("16-bit/this", "ratio_to_16_bit", ".2f", "x")]
_SECONDS = [
    _number("prefill s", "prefill_seconds", ".3f"),
    _number("decode s", "decode_seconds", ".3f"),
    _number("ms/token", "decode_ms_per_token", ".2f"),
]
