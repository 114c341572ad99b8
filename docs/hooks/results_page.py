"""The page of all results: a table for each track, made from the packs in results/ (pack.yaml, tables, samples)."""

from __future__ import annotations

import csv
import gzip
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import yaml

from kvbench.results.statistics import ALPHA, Difference, estimate, smallest_safe

RESULTS = Path(__file__).parents[2] / "results"
TRACKS = {
    "known": "Question known",
    "unknown": "Question unknown",
    "decoding": "Decoding",
    "quantized": "Quantized only",
}
COLUMNS = (
    "rank", "policy", "model", "task", "budget", "n", "score", "difference to full", "loses less than", "lost",
    "gained", "MiB", "share", "footprint", "KL", "safe from", "run",
)  # fmt: skip
FLOORS, CEILINGS = ("random",), ("full", "oracle")
FULL = "full"
FIELDS = {"official": "+policy.value.official=true", "unbias_keys": "policy.store.unbias_keys=true"}
FIELDS |= {f"best={n}": f"policy.selection.best={n}" for n in (7, 9)}
"""The fields behind the remarks after a policy's name; other remarks are fields of the score."""


@dataclass(frozen=True, eq=False)
class Row:
    """A policy at a budget on a task. `numbers`: the columns of its table; score, low and high are its own."""

    track: str
    model: str
    dtype: str
    table: str
    task: str
    policy: str
    budget: float | None
    run_id: str
    command: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def likelihood(self) -> bool:
        """Whether it has the NLL of given texts instead of a score."""
        return "nll" in self.numbers

    @property
    def value(self) -> float:
        """The number by which rows are ranked: more is better."""
        return -self.numbers["nll"] if self.likelihood else self.numbers["score"]

    @property
    def bound(self) -> str:
        """floor or ceiling, for rows that are no method; else nothing."""
        name = self.policy.split(" ")[0]
        return "floor" if name in FLOORS else "ceiling" if name.startswith(CEILINGS) else ""


@cache
def rows() -> tuple[Row, ...]:
    """Every row of every pack."""
    return tuple(row for file in sorted(RESULTS.glob("*/pack.yaml")) for row in _of_pack(file.parent))


def _of_pack(folder: Path) -> Iterator[Row]:
    """The rows of a pack's tables. A run that is in two of them is a row of the first."""
    pack = yaml.safe_load((folder / "pack.yaml").read_text(encoding="utf-8"))
    known, kl = set(), _divergence(folder / "kl.csv")
    for table, own in pack["tables"].items():
        found = [_row(pack, table, own, line) for line in _lines(folder / f"{table}.csv")]
        tracks = dict.fromkeys(row.track for row in found)
        for row in found:
            for track in tracks if row.policy == FULL else [row.track]:  # full is in the tables of all of its rows
                key = track, row.model, row.task, row.policy, row.budget
                if key not in known:
                    more = kl.get(key[2:], {}) if own["track"] == "known" else {}
                    yield replace(row, track=track, numbers={**row.numbers, **more})
                known.add(key)


def _divergence(file: Path) -> dict[tuple[str, str, float | None], dict[str, float]]:
    """The mean KL of each task, policy and budget, of runs that knew the question."""
    lines = _lines(file) if file.exists() else ()
    return {
        (line["task"], line["policy"], float(line["budget"]) if line["budget"] else None): {"kl": float(line["kl"])}
        for line in lines
    }


def _lines(file: Path) -> Iterator[dict[str, str]]:
    """The rows of a table. One with a column for each task (the control experiment) has a row for each of them."""
    for line in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        tasks = [
            name.removesuffix("_low") for name in line if name.endswith("_low") and name.removesuffix("_low") in line
        ]
        tasks = [name for name in tasks if name.startswith("ruler_")]
        if not tasks:
            yield line
        for task in tasks:
            score = {"score": line[task], "low": line[f"{task}_low"], "high": line[f"{task}_high"]}
            same = line["run_id"] if f"-{task}-" in line["run_id"] else ""
            yield {"task": task, **{key: line[key] for key in ("policy", "budget", "n")}, **score, "run_id": same}


def _row(pack: Mapping[str, Any], table: str, own: Mapping[str, Any], line: Mapping[str, str]) -> Row:
    policy = line["policy"] + _variant(line)
    budget = float(line["budget"]) if line["budget"] else None
    model, task = line.get("model") or pack["model"], line["task"]
    numbers = {name: float(text) for name, text in line.items() if _is_number(text)}
    track = "quantized" if budget is None and policy != FULL else own["track"]
    command = _command(pack, table, own, model, task, policy, budget)
    run = line.get("run_id", "")
    task += f", {own['prompts']}" if "prompts" in own else ""  # other ones: not ranked with those of the task
    return Row(track, model, own["dtype"], table, task, policy, budget, run, command, numbers)


def _variant(line: Mapping[str, str]) -> str:
    """The fields by which the rows of an ablation differ, where they are not the usual ones."""
    words = ["official"] * (line.get("official") == "True")
    aggregate = line.get("aggregate") or "max"
    words += [f"aggregate={aggregate}"] * (aggregate != "max")
    words += ["floor=false"] * (line.get("floor") == "False")
    return f" ({', '.join(words)})" if words else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True


def _command(
    pack: Mapping[str, Any],
    table: str,
    own: Mapping[str, Any],
    model: str,
    task: str,
    policy: str,
    budget: float | None,
) -> str:
    """The command that computes a row."""
    name, _, changed = policy.rstrip(")").partition(" (")
    start = own.get("command") or f"kvbench experiment=results/{pack['model']}/{own.get('experiment', table)}"
    words = [start, *([f"model={model}"] if "command" in own else [])]
    task = task.removesuffix("_cot_zeroshot")
    words.append(f"task={task.replace('_', '/', 1) if task.startswith(('ruler_', 'longbench_')) else task}")
    words += [f"policy={name}", *([f"budget={budget:g}"] if budget is not None else [])]
    words += [FIELDS.get(change, f"policy.scorer.{change}") for change in filter(None, changed.split(", "))]
    words += own.get("fields", "").split() if budget is not None else []
    words += [f"limit={own['limit']}", *([f"task.data_dir={own['data'].upper()}"] if "data" in own else [])]
    return " ".join(words)


# --- tables ----------------------------------------------------------------------------------------------------------
def ranks(some: Sequence[Row]) -> dict[Row, str]:
    """The rank of each row among the methods with its model, task and budget; equal values share one."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in some:
        groups[row.model, row.task, row.budget].append(row)
    found: dict[Row, str] = {}
    for group in groups.values():
        values = [row.value for row in group if not row.bound]
        for row in group:
            place = 1 + sum(value > row.value for value in values)
            found[row] = row.bound or (f"{place}" if values.count(row.value) == 1 else f"{place}=")
    return found


def safe_sizes(some: Sequence[Row]) -> dict[tuple[str, ...], float | None]:
    """The smallest safe size in MiB of each policy on each task, by `_method`; None: no size is shown to be safe."""
    sizes: dict[tuple[str, ...], dict[float, Difference]] = defaultdict(dict)
    for row in some:
        if "vs_full_low" in row.numbers and not row.likelihood and row.policy != FULL:
            mean, low, high = (row.numbers[name] for name in ("vs_full", "vs_full_low", "vs_full_high"))
            sizes[_method(row)][row.numbers["cache_mib"]] = Difference(mean, low, high, 1.0, int(row.numbers["n"]), "")
    return {method: smallest_safe(found) for method, found in sizes.items()}


def _method(row: Row) -> tuple[str, ...]:
    return row.table, row.model, row.task, row.policy


def track_table(track: str) -> str:
    """The table of a track as HTML, with attributes by which docs/javascripts/filter-tables.js filters its rows."""
    own = [row for row in rows() if row.track == track]
    own.sort(key=lambda row: (row.model, row.task, -(row.budget or 1e9), -row.value, row.policy))
    places, safe = ranks(own), safe_sizes(own)
    lines = [f'<div class="results-table" markdown="0"><table class="results" data-track="{track}">', "<thead><tr>"]
    lines += [f"<th>{name}</th>" for name in COLUMNS]
    lines.append("</tr></thead><tbody>")
    for row in own:
        size = f"{row.budget:g}" if row.budget is not None else "-"
        task = row.task.removeprefix("ruler_")
        shown = f'data-model="{escape(row.model)}" data-task="{escape(task)}" data-size="{size}"'
        shown += f' class="{row.bound}"' if row.bound else ""
        lines.append(
            f"<tr {shown}>{''.join(f'<td>{cell}</td>' for cell in _cells(row, places[row], task, size, safe))}</tr>"
        )
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def _cells(row: Row, place: str, task: str, size: str, safe: Mapping[tuple[str, ...], float | None]) -> tuple[str, ...]:
    get, of = row.numbers.get, escape
    low, high, value = get("low"), get("high"), row.numbers["nll" if row.likelihood else "score"]
    score = estimate(value, low, high, ".3f", ".2f") + " nats" * row.likelihood
    less, ends = get("vs_full"), (get("vs_full_low"), get("vs_full_high"))
    difference = bound = ""
    if less is not None and ends[0] is not None and row.policy != FULL:
        star = "*" if get("p_holm", 1.0) <= ALPHA else ""
        difference = estimate(less, *ends, "+.3f", "+.2f") + star
        bound = f"{ends[1]:.2f} nats" if row.likelihood else f"{max(0.0, -ends[0]):.2f}"
    known = safe.get(_method(row))
    return (
        place,
        f"<code>{of(row.policy)}</code>",
        of(row.model),
        of(task),
        size,
        f"{get('n', 0):.0f}",
        score,
        difference,
        bound,
        *(_text(get(name), ".0%") for name in ("lost", "gained")),
        _text(get("cache_mib"), ".2f"),
        _text(get("share_of_full"), ".1%") + (f" of {row.dtype}" if "share_of_full" in row.numbers else ""),
        _text(get("kv_footprint"), ".2f"),
        _text(get("kl"), ".3f"),
        _text(known, ".2f"),
        _links(row),
    )


def _text(number: float | None, how: str) -> str:
    return "" if number is None else format(number, how)


def _links(row: Row) -> str:
    examples = f' <a href="all_results/{escape(row.run_id)}.csv">examples</a>' if row.run_id in samples() else ""
    run = f"<br>run id: <code>{escape(row.run_id)}</code>" if row.run_id else ""
    return f"<details><summary>command</summary><code>{escape(row.command)}</code>{run}</details>{examples}"


@cache
def samples() -> dict[str, str]:
    """The examples of every run that packs kept, as CSV."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for file in sorted(RESULTS.glob("*/samples.csv.gz")):
        hashes = {}
        if (prompts := file.with_name("prompts.csv")).exists():
            lines = csv.DictReader(prompts.read_text(encoding="utf-8").splitlines())
            hashes = {(one["table"], one["task"], one["example"]): one["prompt_hash"] for one in lines}
        with gzip.open(file, "rt", encoding="utf-8", newline="") as text:
            for one in csv.DictReader(text):
                known = hashes.get((one["table"], one["task"], one["example"]), "")
                found[one["run_id"]].append({**one, "prompt_hash": one.get("prompt_hash") or known})
    texts = {}
    for run, lines_of in found.items():
        columns = [name for name in lines_of[0] if name != "run_id" and any(one[name] for one in lines_of)]
        out = io.StringIO()
        writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines_of)
        texts[run] = out.getvalue()
    return texts


def counts() -> str:
    """A sentence about safe sizes."""
    found = [size for track in TRACKS for size in safe_sizes([row for row in rows() if row.track == track]).values()]
    safe = sum(size is not None for size in found)
    return f"{safe} of {len(found)} policies on a task have one."
