"""The table at the end of a run or a sweep."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvbench.report.collect import bits_per_number, quantises, ratio_to_16_bit
from kvbench.report.records import RunRecord, gap, labelled, with_baselines
from kvbench.runs.labels import compressed, evicts, schedule
from kvbench.runs.statistics import Difference

_WIDTH = 300  # wider than any table of ours: where a terminal is narrower it folds lines, but no number is cut off


@dataclass(frozen=True)
class _Number:
    """A column of numbers: what stands above it, and in the row of a run."""

    title: str
    value: Callable[[RunRecord], str]


def print_table(runs: Sequence[RunRecord]) -> None:
    """Print one row per run on stdout: a run named twice (`full` at two budgets) is shown once.

    Runs that scored given texts have a table of their own: NLL and perplexity are no scores.
    """
    unique = with_baselines(labelled(list({run.run_id: run for run in runs}.values())))
    console = Console(file=sys.stdout, width=_WIDTH, highlight=False)
    with console.capture() as text:
        for kind in (False, True):
            alike = [run for run in unique if (run.metrics["likelihood"] is not None) == kind]
            if alike:
                console.print(results_table(alike))
        for note in notes(unique):
            console.print(note)
    lines = [line.rstrip() for line in text.get().splitlines()]
    sys.stdout.write("\n".join(lines) + "\n")
    if len(unique) == 1:
        sys.stdout.write(f"results: {unique[0].folder}\n")


def notes(runs: Sequence[RunRecord]) -> list[str]:
    """What a reader must know before comparing the rows, a line each."""
    found = [f"mixed versions in {run.run_id}: {run.mixed}" for run in runs if run.mixed]
    if any(run.metrics["n_shared"] for run in runs):
        found.append("no seconds where prefills and steps were shared: engine.rows=1 times runs one by one")
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


def results_table(runs: Sequence[RunRecord]) -> Table:
    """Scores or NLLs with their 95% intervals, tokens and bytes really held, and seconds; of runs of one kind.

    Where one of the runs is that of the full cache the others are compared with it. All are means per example, but for
    NLL and perplexity: over tokens.
    """
    models = {run.names["model"] for run in runs}
    table = Table(title=None if len(models) > 1 else f"model: {models.copy().pop()}", title_justify="left", box=None)
    left = ["policy", "task"] if len(models) == 1 else ["model", "policy", "task"]
    told = list(dict.fromkeys(name for run in runs for name in run.differs))
    for name in [*left, *told]:
        table.add_column(name, no_wrap=True)
    compares = any(run.baseline is not None for run in runs)
    reads = runs[0].metrics["likelihood"] is not None
    coded = _CODED if any(map(quantises, runs)) else []
    device = _DEVICE if any(run.metrics["device_peak_bytes"] is not None for run in runs) else []
    seconds = [] if all(run.metrics["n_shared"] for run in runs) else _SECONDS
    held = [_KEPT, *(_READ_HELD if reads else []), *_BYTES, *device, *coded, *seconds]
    numbers = [*_FIRST, *(_READ if reads else _SCORED), *held]
    numbers = [number for number in numbers if compares or "vs full" not in number.title]
    for number in numbers:
        table.add_column(number.title, justify="right", no_wrap=True)
    for run in runs:
        words = [*(run.names[name] for name in left), *(run.differs.get(name, "-") for name in told)]
        table.add_row(*words, *(number.value(run) for number in numbers))
    return table


def _budget(run: RunRecord) -> str:
    return "-" if run.identity["budget"] is None else str(run.identity["budget"])


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
    found = gap(run)
    if found is None:
        return ""
    return f"{found.nll:+.4f} (one text) " if found.interval is None else _difference(found.interval, digits=4)


def _gap(run: RunRecord) -> str:
    found = gap(run)
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


def _used(run: RunRecord) -> float | None:
    """Bytes in which a token lies, or what belongs to all of them."""
    held = run.metrics["cache_bytes"]
    return None if held is None else held - (run.metrics["spare_bytes"] or 0)


_FIRST = [_Number("budget", _budget), _Number("n", lambda run: str(run.metrics["n"]))]
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
    _Number("cache MiB", lambda run: _number(_used(run), ".3f", scale=2**-20)),
    _Number("of full", lambda run: _number(run.metrics["cache_share"], ".1f", "%", scale=100)),
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
