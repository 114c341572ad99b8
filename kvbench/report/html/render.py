"""Renders the report: computes the values of the template `page.html`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvbench.errors import UsageError
from kvbench.report.figures import pictures
from kvbench.report.figures.panels import once
from kvbench.report.figures.sheet import Paper
from kvbench.report.figures.style import encoded, house_style
from kvbench.report.html import tables
from kvbench.report.html.caveats import caveats
from kvbench.report.html.examples import LEVELS, examples
from kvbench.results.environment import machine
from kvbench.results.labels import flat
from kvbench.results.result import Result


def page(results: Sequence[Result], folder: Path) -> str:
    """The report as one HTML document without external files."""
    rows = tables.in_order(results)
    groups = tables.groups(rows)
    bundle = resources.files("itables") / "html"  # DataTables, from the package itables
    environment = Environment(
        loader=PackageLoader("kvbench.report.html", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"budget": tables.budget_text, "amount": tables.amount, "number": tables.number}
    return environment.get_template("page.html").render(
        title=folder.resolve().name,
        rows=rows,
        kinds=[("score", [g for g in groups if not g.rows[0].reads]), ("NLL", [g for g in groups if g.rows[0].reads])],
        marks={row: mark for group in groups for row, mark in tables.marks(group).items()},
        matrices=tables.matrices(rows),
        figures=_figures(rows),
        costs=tables.costs(rows),
        caveats=caveats(rows, groups),
        tasks=examples(rows),
        levels=range(1, LEVELS + 1),
        facts=_facts(rows),
        policies={row.line: _fields(row) for row in rows},
        below=folder,
        datatables=Markup((bundle / "dt_bundle.js").read_text(encoding="utf-8").replace("<!--", "<\\!--")),
        datatables_css=Markup((bundle / "dt_bundle.css").read_text(encoding="utf-8")),
    )


def _figures(rows: Sequence[Result]) -> list[tuple[str, str]]:
    """The figures of `kvbench.plot`: names and data URLs with their SVG."""
    with house_style():
        try:
            found = pictures.figures(pictures.ALL, once(rows), Paper())
        except UsageError:  # no run has a score
            return []
        images = [(name, b64encode(encoded(figure, ".svg")).decode()) for name, figure in found]
    return [(name, f"data:image/svg+xml;base64,{image}") for name, image in images]


def _facts(rows: Sequence[Result]) -> list[tuple[str, str]]:
    """Versions and settings that are needed to repeat the runs; several values if the runs differ."""
    places = [row.environment for row in rows]
    packages = sorted({name for place in places for name, version in place["packages"].items() if version})
    found: dict[str, Iterable[object]] = {
        "model": [f"{row.model_label} ({row.weights})" for row in rows],
        "dtype": [row.identity["dtype"] for row in rows],
        "decoding": [row.identity["generation"]["decoding"] for row in rows],
        "seed": [row.identity["seed"] for row in rows],
        "kvbench revision": [place["kvbench_revision"] or "unknown" for place in places],
        "hardware": [machine(place) for place in places],
        "python": [place["python"] for place in places],
        **{name: [place["packages"].get(name) for place in places] for name in packages},
    }
    return [(name, "; ".join(sorted({str(value) for value in values}))) for name, values in found.items()]


def _fields(row: Result) -> str:
    """Every field of a policy."""
    fields = flat({key: value for key, value in row.identity["policy"].items() if key != "class"})
    return ", ".join(f"{key}={value}" for key, value in fields.items() if value is not None)
