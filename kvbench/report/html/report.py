"""`kvbench report DIR -o report.html`: all runs below a folder as one HTML file."""

from __future__ import annotations

import re
import sys
from base64 import b64encode
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbench.errors import UsageError, counted, from_extra
from kvbench.report.selection import selected, selection_options
from kvbench.tasks.trust import trust_option
from kvbench.terminal.command import PATH, Command, log_to_stderr, program
from kvbench.terminal.outputs import check_output, writing

if TYPE_CHECKING:
    from markupsafe import Markup

    from kvbench.results.result import Result


DETAILED = 200
"""The most rows that have figures, changes and examples. Only their samples are read."""


@click.command("report", cls=Command)
@click.argument("folder", type=PATH)
@click.option("-o", "--output", type=PATH, default="report.html", show_default=True, help="HTML file to write.")
@selection_options(joined=True)
@trust_option
def cli(folder: Path, output: Path, **options: Any) -> None:  # noqa: ANN401 - of the selection
    """One HTML page of all runs below FOLDER: tables, figures, examples, caveats."""
    log_to_stderr()
    check_output(output, (".html",))
    from kvbench.results.loading import load_results

    results = selected(load_results(folder), options)
    nbytes = write_report(results, folder, output)
    runs = sum(row.n_seeds or 1 for row in results)
    sys.stdout.write(f"report: {output} ({counted(runs, 'run')}, {nbytes / 1e6:.1f} MB, opens in any browser)\n")


main = program(cli)


def write_report(results: Sequence[Result], folder: Path, output: Path) -> int:
    """Write the report and return its size in bytes. If writing fails, raises UsageError and keeps the old file."""
    check_output(output, (".html",))
    from kvbench.results.files import atomic_write

    written = html_report(results, folder).encode()
    with writing(output), atomic_write(output) as temporary:
        temporary.write_bytes(written)
    return len(written)


def html_report(results: Sequence[Result], folder: Path) -> str:
    """The report as one HTML document without external files."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # imported here: torch and matplotlib are slow
    from markupsafe import Markup

    from kvbench.report.changes import changes_table
    from kvbench.report.evidence import evidence_table, has_evidence
    from kvbench.report.table import against, measure
    from kvbench.results.labels import flat

    with from_extra("report", "a report"):
        import itables  # contains DataTables

        from kvbench.report.html import tables
        from kvbench.report.html.caveats import caveats
        from kvbench.report.html.examples import LEVELS, examples

    rows = tables.in_order(results)
    detailed = _detailed(rows)
    groups = tables.groups(rows)
    bundle = resources.files(itables) / "html"
    loader = PackageLoader("kvbench.report.html", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = {"budget": tables.budget_text, "amount": tables.amount, "number": tables.number, "cost": tables.cost_text}
    filters |= {"measure": measure, "against": against, "interval": _interval, "breakable": _breakable}
    filters["counted"] = lambda number, several, one: f"{number} {one if number == 1 else several}"
    environment.filters.update(filters)
    parts = {row.line: flat({k: v for k, v in row.identity["policy"].items() if k != "class"}) for row in rows}
    return environment.get_template("report.html").render(
        title=folder.resolve().name,
        rows=rows,
        runs=sum(row.n_seeds or 1 for row in rows),
        left_out=sorted({row.line for row in rows} - {row.line for row in detailed}),
        models=len({row.model_label for row in rows}),
        batched=any(row.n_shared for row in rows),
        recurrent=any(row.state_bytes for row in rows),
        kinds=[(kind, [g for g in groups if g.rows[0].measure == kind]) for kind in ("score", "NLL", "KL")],
        to_full={row: one for group in groups for row, one in tables.to_full(group).items()},
        marks={row: mark for group in groups for row, mark in tables.marks(group).items()},
        matrices=tables.matrices(rows),
        figures=_figures(detailed),
        costs=tables.costs(rows),
        changes=changes_table(detailed) if any(row.changes for row in detailed) else None,
        evidence=evidence_table(known) if (known := [row for row in detailed if has_evidence(row)]) else None,
        caveats=caveats(rows, groups),
        tasks=examples(detailed),
        levels=range(1, LEVELS + 1),
        facts=_facts(rows),
        policies={n: ", ".join(f"{k}={v}" for k, v in of.items() if v is not None) for n, of in parts.items()},
        below=folder,
        datatables=Markup((bundle / "dt_bundle.js").read_text(encoding="utf-8").replace("<!--", "<\\!--")),
        datatables_css=Markup((bundle / "dt_bundle.css").read_text(encoding="utf-8")),
    )


def _interval(text: str) -> Markup:
    """A number in the notation of all tables, with its interval in small print."""
    from markupsafe import Markup

    value, bracket, ends = text.partition(" (")
    return Markup("{} <small>({}</small>").format(value, ends) if bracket else Markup("{}").format(value)


def _breakable(label: str) -> Markup:
    """A label that a narrow table breaks behind its signs, and not inside of words."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.findall(r".+?(?:[_,=]|$)", label)) if label else Markup("")


def _detailed(rows: Sequence[Result]) -> list[Result]:
    """The rows of the first policies, each with all of its budgets and tasks, up to DETAILED rows."""
    chosen: set[str] = set()
    for line in dict.fromkeys(row.line for row in rows):
        if sum(row.line in {*chosen, line} for row in rows) <= DETAILED or not chosen:
            chosen.add(line)
    return [row for row in rows if row.line in chosen]


def _figures(rows: Sequence[Result]) -> list[tuple[str, str, str]]:
    """The figures of `kvbench.plot`: a text for readers who do not see it, and data URLs with the SVG of each for light
    and for dark paper.
    """
    from kvbench.report.figures import pictures
    from kvbench.report.figures.panels import once
    from kvbench.report.figures.sheet import Paper
    from kvbench.report.figures.style import encoded, house_style

    drawn: dict[str, list[str]] = {}
    for dark in (False, True):
        with house_style(dark=dark):
            try:
                found = pictures.figures(pictures.ALL, once(rows), Paper())
            except UsageError:  # no run has a score
                return []
            for name, figure in found:
                image = b64encode(encoded(figure, ".svg")).decode()
                drawn.setdefault(name, []).append(f"data:image/svg+xml;base64,{image}")
    return [(_seen(name, rows), light, dark_one) for name, (light, dark_one) in drawn.items()]


def _seen(name: str, rows: Sequence[Result]) -> str:
    """What there is to see in a figure, in words: its kind, the best and the worst policies, and all policies."""
    kind = next((kind for kind in _SEEN if name.startswith(kind)), "")
    own = [row for row in rows if name == f"{kind}-{row.task_label}-{row.model_label}"] or rows
    measured = "KL" if kind.startswith("kl") else "NLL" if kind == "nll" else "score"
    best = "" if kind == "layers" else _extremes([row for row in own if row.measure == measured])
    return f"{_SEEN.get(kind, name)}. {best}Shown: {', '.join(dict.fromkeys(row.line for row in own))}."


def _extremes(rows: Sequence[Result]) -> str:
    """The best and the worst policy of every model, task and budget, and the full cache, in words."""
    groups: dict[tuple[str, str, object], list[Result]] = {}
    for row in rows:
        if row.value is not None:
            key = row.model_label, row.task_label, None if row.is_full else row.budget
            groups.setdefault(key, []).append(row)
    several = len({model for model, _, _ in groups}) > 1
    words = []
    for (model, task, budget), own in groups.items():
        order = sorted(own, key=lambda row: (row.value or 0) * (-1 if row.measure == "score" else 1))
        ends = ", ".join(f"{row.line} {row.value:.3g}" for row in dict.fromkeys((order[0], order[-1])))
        at = "" if budget is None else f" at budget {budget}"
        words.append(f"{f'{model}, ' * several}{task}{at}: {ends}")
    more = "; ..." if len(words) > MOST_WORDS else ""
    return f"Best and worst: {'; '.join(words[:MOST_WORDS])}{more}. " if words else ""


MOST_WORDS = 12
"""The most groups of runs that the text of a figure names."""


_SEEN = {
    "budget": "Score against the budget, one line per policy, with 95% intervals",
    "bytes": "Score against the bytes that the cache holds, one line per policy, with 95% intervals",
    "heatmap": "Needle tests: scores by length and depth, one map per policy, from dark blue (0) to yellow (1)",
    "nll": "NLL against the length of the context, one line per policy",
    "kl-budget": "Divergence from full (KL) against the budget, one line per policy, with 95% intervals",
    "kl-bytes": "Divergence from full (KL) against the bytes that the cache holds, one line per policy",
    "kl-position": "Divergence from full (KL) by position in the answer, one line per policy",
    "evidence": "Right answers, and whether the evidence of wrong ones is held, one bar per policy and budget",
    "layers": "Tokens that each layer holds, one line per policy",
}
"""What a kind of figure shows."""


def _facts(rows: Sequence[Result]) -> list[tuple[str, str]]:
    """Versions and settings that are needed to repeat the runs; several values if the runs differ."""
    from kvbench.results.session import machine

    places = [row.environment for row in rows]
    packages = sorted({name for place in places for name, version in place["packages"].items() if version})
    found: dict[str, Iterable[object]] = {
        "model": [f"{row.model_label} ({row.weights})" for row in rows],
        "dtype": [row.identity["dtype"] for row in rows],
        "decoding": [row.identity["generation"]["decoding"] for row in rows],
        "seed": [seed for row in rows for seed in row.seeds or (row.identity["seed"],)],
        "kvbench revision": [place["kvbench_revision"] or "unknown" for place in places],
        "hardware": [machine(place) for place in places],
        "python": [place["python"] for place in places],
        **{name: [place["packages"].get(name) for place in places] for name in packages},
    }
    return [(name, "; ".join(sorted({str(value) for value in values}))) for name, values in found.items()]
