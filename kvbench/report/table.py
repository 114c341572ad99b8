"""Tables for people: at the end of a run or a sweep, and as files beside the tidy table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.analysis.statistics import Difference
from kvbench.identity.labels import compressed, evicts, in_words, parted, schedule, when
from kvbench.report.columns import bits_per_number, quantises, ratio_to_16_bit
from kvbench.report.grid import Block, Cell, Grid, Row
from kvbench.report.plain_text import text
from kvbench.report.records import RunRecord, labelled, with_baselines
from kvbench.terminal.folding import terminal_width

NONE = "-"
POLICY, SUBSET, BUDGET, EXAMPLES, STATE, WHEN = "policy", "subset", "budget", "n", "state", "when"
WIDE = 100  # letters of a line at most


@dataclass(frozen=True)
class _Number:
    """A column of numbers: what stands above it, and in the row of a run."""

    title: str
    value: Callable[[RunRecord], str]


@dataclass(frozen=True)
class Line:
    """A row before it is set: what names it, by column, its budget, its run; None for a cell without a finished one."""

    words: Mapping[str, str]
    budget: float | None
    run: RunRecord | None


def print_table(runs: Sequence[RunRecord]) -> None:
    """Print one row per run on stdout: a run named twice (`full` at two budgets) is shown once.

    Columns that do not fit into 100 letters, or into a narrower terminal, stand in a second table below.
    """
    unique = with_baselines(labelled(list({run.run_id: run for run in runs}.values())))
    sys.stdout.write("\n".join(text(grid, min(WIDE, terminal_width() or WIDE)) for grid in results_grids(unique)))
    if len(unique) == 1:
        sys.stdout.write(f"results: {unique[0].folder}\n")


def results_grids(runs: Sequence[RunRecord], missing: Sequence[Mapping[str, Any]] = ()) -> list[Grid]:
    """The runs as a table; those that scored given texts in one of their own, for NLL and perplexity are no scores.

    What is the same in all rows is said once, above. missing: cells without a finished run, as the tidy table has them.
    """
    lines, below = lines_of(runs, missing)
    kinds: list[list[Line]] = [[], []]
    for line in lines:
        kinds[line.run is not None and line.run.metrics["likelihood"] is not None].append(line)
    if not any(line.run for line in kinds[0]):
        kinds = [[*kinds[0], *kinds[1]]]
    found = [_grid(kind) for kind in kinds if kind]
    found[-1] = replace(found[-1], notes=(*found[-1].notes, *(("", note) for note in [*below, *notes(runs)])))
    return found


def lines_of(runs: Sequence[RunRecord], missing: Sequence[Mapping[str, Any]] = ()) -> tuple[list[Line], list[str]]:
    """Rows with what names them, and a sentence on when all of them evict, if that is the same for all."""
    told = list(dict.fromkeys(name for run in runs for name in run.differs))
    lines = [Line(_words(run, told), run.identity["budget"], run) for run in runs]
    lines += [Line(_missing_words(row, told), row[BUDGET], None) for row in missing]
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


def _words(run: RunRecord, told: Sequence[str]) -> dict[str, str]:
    policy, budget, evicting = run.names["policy"], run.identity["budget"], when(run.naming, run.identity)
    return {
        "model": run.names["model"],
        POLICY: parted(policy)[0] if evicting else policy,
        "task": run.names["task"],
        WHEN: evicting,
        SUBSET: run.subset,
        **{name: run.differs.get(name, NONE) for name in told},
        BUDGET: NONE if budget is None else str(budget),
        EXAMPLES: str(run.metrics["n"]),
        STATE: "finished",
    }


def _missing_words(row: Mapping[str, Any], told: Sequence[str]) -> dict[str, str]:
    policy = json.loads(row.get("policy_fields") or "{}")
    evicting = when(None, {"policy": policy, BUDGET: row[BUDGET], "compress": row.get("compress", "prompt")})
    called = str(row[POLICY])
    named = {"model": str(row["model"]), POLICY: parted(called)[0] if evicting else called, "task": str(row["task"])}
    fields = {name: str(row.get(name, NONE)) for name in told}
    budget = NONE if row[BUDGET] is None else str(row[BUDGET])
    held = {BUDGET: budget, EXAMPLES: str(row[EXAMPLES]), STATE: str(row[STATE])}
    return {**named, WHEN: evicting, SUBSET: "all", **fields, **held}


def _grid(lines: Sequence[Line]) -> Grid:
    """Rows of one kind. Columns of words and budgets stand only where rows differ; numbers always.

    Models and tasks are titles of blocks instead, where blocks have two rows or more on average.
    """
    runs = [line.run for line in lines if line.run is not None]
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
    numbers = list(_numbers(runs))
    return Grid(
        name="",
        title=shared(lines[0].words, same),
        corner=POLICY,
        header=tuple((title,) for title in [*shown, *(number.title for number in numbers)]),
        blocks=tuple(Block(t, tuple(_row(x, shown, numbers) for x in members)) for t, members in blocks.items()),
        notes=tuple(("", note) for note in _legend(runs)),
        left=tuple(i for i, name in enumerate(shown) if name not in (BUDGET, EXAMPLES)),
        keys=len(shown),
    )


def _row(line: Line, shown: Sequence[str], numbers: Sequence[_Number]) -> Row:
    cells = [*(line.words[n] for n in shown), *("" if line.run is None else x.value(line.run) for x in numbers)]
    return Row(line.words[POLICY], tuple(Cell(words) for words in cells))


def shared(words: Mapping[str, str], same: set[str]) -> str:
    """What all rows share, in the words of a heading."""
    silent = {EXAMPLES, STATE, WHEN} | ({SUBSET} if words[SUBSET] == "all" else set())
    told = [f"{name} {value}" for name, value in words.items() if name in same - silent]
    many = [f"{words[EXAMPLES]} example{'s' * (words[EXAMPLES] != '1')}"] if EXAMPLES in same else []
    return ", ".join([*told, *many])


def _numbers(runs: Sequence[RunRecord]) -> Iterator[_Number]:
    """The columns of numbers that some of the runs have; vs full only where there is a full cache to compare with."""
    reads = any(run.metrics["likelihood"] is not None for run in runs)
    compares = any(run.baseline is not None for run in runs)
    yield from (x for x in (_READ if reads else _SCORED) if compares or "vs full" not in x.title)
    yield _KEPT
    yield from _READ_HELD if reads else []
    yield from _BYTES
    yield from _DEVICE if any(run.metrics["device_peak_bytes"] is not None for run in runs) else []
    yield from _CODED if any(map(quantises, runs)) else []
    if not all(run.metrics["n_shared"] for run in runs):
        yield from (seconds for seconds in _SECONDS if any(seconds.value(run) != NONE for run in runs))


def _legend(runs: Sequence[RunRecord]) -> list[str]:
    """What a reader who sees such a table for the first time must know."""
    reads = any(run.metrics["likelihood"] is not None for run in runs)
    what = "text" if reads else "example"
    told = ["m: tokens scored between two evictions" if reads else "score: mean, 1 is best"]
    if any(run.baseline is not None for run in runs):
        told.append(f"vs full: on the same {what}s, * where the 95% interval leaves out 0")
    budget = "budget: tokens a KV head may keep (below 1: share of the prompt)"
    return ["; ".join(told), f"{budget}; kept, cache: held at the end"]


def notes(runs: Sequence[RunRecord]) -> list[str]:
    """What a reader must know before comparing the rows, a line each."""
    found = [f"mixed versions in {run.run_id}: {run.mixed}" for run in runs if run.mixed]
    if any(run.metrics["n_shared"] for run in runs):
        found.append("Times are not shown for batched runs. Use engine.rows=1 to time each run alone.")
    return found + unlike([run for run in runs if evicts(run.identity) and run.naming and run.naming.reads is None])


def unlike(runs: Sequence[RunRecord]) -> list[str]:
    """Sentences for policies that evict at other moments: they are other experiments, not only other policies."""
    found = []
    modes = sorted({compressed(run.identity) for run in runs})
    if len(modes) > 1:
        found.append(
            f"what is compressed differs ({', '.join(modes)}): a context is compressed before its question was seen, a "
            "prompt with it; compare rows of one kind (compress=)"
        )
    schedules = {schedule(run.identity) for run in runs}
    if len(schedules) > 1:
        prompts = "what evicts at the end of the prompt has seen the question, what evicts in blocks has not"
        contexts = "what evicts in blocks decides before it has read the rest of the context"
        found.append(
            f"schedules differ ({', '.join(sorted(schedules))}): {contexts if modes == ['context'] else prompts}; "
            "compare rows of one schedule (schedule=)"
        )
    if len({run.identity["policy"]["schedule"]["decode"] for run in runs}) > 1:
        found.append(
            "decoding differs (evict, grow): what grows keeps every new token beside its budget; compare rows of one "
            "rule (decode=)"
        )
    return found


def measure(run: RunRecord) -> str:
    """What a run is judged by, with its 95% interval: its score, or the NLL of the texts it was given."""
    return _score(run) if run.metrics["likelihood"] is None else _nll(run)


def _score(run: RunRecord) -> str:
    numbers = run.metrics
    if numbers["score"] is None:
        return f"none: {numbers['n_failed']} failed"
    return f"{numbers['score']:.3f} ({numbers['score_low']:.2f}-{numbers['score_high']:.2f})"


def _against(run: RunRecord) -> str:
    """Mean difference to the baseline over the examples both have; "*" where the two can be told apart."""
    return "" if run.vs_full is None else _difference(run.vs_full)


def _difference(found: Difference, digits: int = 3) -> str:
    star = "*" if found.claims else " "
    return f"{found.mean:+.{digits}f} ({found.low:+.{digits - 1}f}..{found.high:+.{digits - 1}f}){star}"


def _nll(run: RunRecord) -> str:
    numbers = run.metrics["likelihood"]
    if numbers["nll"] is None:
        return f"none: {run.metrics['n_failed']} failed"
    if numbers["interval"] is None:
        return f"{numbers['nll']:.4f} (one text)"
    return f"{numbers['nll']:.4f} ({numbers['nll_low']:.3f}-{numbers['nll_high']:.3f})"


def _nll_against(run: RunRecord) -> str:
    found = run.gap
    if found is None:
        return ""
    return f"{found.nll:+.4f} (one text) " if found.interval is None else _difference(found.interval, digits=4)


def _gap(run: RunRecord) -> str:
    found = run.gap
    return "" if found is None else f"{found.perplexity:+.4g}"


def _most_kept(run: RunRecord) -> str:
    """The most tokens a KV head of any layer held while tokens were scored."""
    layers = run.metrics["likelihood"].get("max_kept_tokens")
    return "-" if layers is None else str(max(max(heads) for heads in layers))


def _read(name: str, how: str) -> Callable[[RunRecord], str]:
    return lambda run: _number(run.metrics["likelihood"].get(name), how)


def _seconds(name: str, how: str) -> Callable[[RunRecord], str]:
    return lambda run: "shared" if run.metrics["n_shared"] else _number(run.metrics[name], how)


def _number(value: float | None, how: str, unit: str = "", scale: float = 1) -> str:
    return "-" if value is None else f"{value * scale:{how}}{unit}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.{0 if share > 0.9995 else 1}f}%"


_SCORED = [_Number("score (95% CI)", _score), _Number("vs full (95% CI)", _against)]
_READ = [
    _Number("tokens", _read("scored_tokens", "d")),
    _Number("NLL, lower is better (95% CI)", _nll),
    _Number("vs full (95% CI)", _nll_against),
    _Number("PPL", _read("perplexity", ".4g")),
    _Number("PPL vs full", _gap),
]
_READ_HELD = [_Number("most kept", _most_kept)]
_KEPT = _Number("kept/KV head", lambda run: _number(run.metrics["kept_tokens"], ".1f"))
_BYTES = [
    _Number("cache MiB", lambda run: _number(run.metrics["cache_bytes"], ".3f", scale=2**-20)),
    _Number("of full", lambda run: _percent(run.metrics["cache_share"])),
    _Number("spare MiB", lambda run: _number(run.metrics["spare_bytes"], ".3f", scale=2**-20)),
    _Number("peak MiB", lambda run: _number(run.metrics["peak_bytes"], ".3f", scale=2**-20)),
]
_DEVICE = [_Number("device peak MiB", lambda run: _number(run.metrics["device_peak_bytes"], ".0f", scale=2**-20))]
_CODED = [
    _Number("bits/number", lambda run: _number(bits_per_number(run), ".2f")),
    _Number("16-bit/this", lambda run: _number(ratio_to_16_bit(run), ".2f", "x")),
]
_SECONDS = [
    _Number("prefill s", _seconds("prefill_seconds", ".3f")),
    _Number("decode s", _seconds("decode_seconds", ".3f")),
    _Number("ms/token", _seconds("decode_ms_per_token", ".2f")),
]
