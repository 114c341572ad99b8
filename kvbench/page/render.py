"""The page itself: everything in one file, which asks no network for anything and says so to the browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvbench.analysis.result import Result
from kvbench.identity.labels import budget_order
from kvbench.page import about, caveats, charts, examples, maps, published, ranking, swatches, tables
from kvbench.page.libraries import libraries
from kvbench.page.rows import budget_words, in_order
from kvbench.report.figures.panels import looks

MANY = 6  # panels: with more, only the one by budget is shown at first


def page(runs: Sequence[Result], folder: Path, most_bytes: int = examples.MOST_BYTES) -> str:
    """The report of finished runs below `folder` as HTML. most_bytes: of the examples in it, see `examples.browser`."""
    rows = in_order(runs)
    where = ranking.standings(rows)
    palette = looks(rows)
    cards = charts.cards(rows, palette)
    needles, kept = maps.needle_maps(rows), maps.budget_maps(rows)
    browsed = examples.browser(rows, most_bytes)
    drawn = {line: swatches.svg(look) for line, look in palette.items()}
    data = {
        "figures": [card.spec for card in (*cards, *needles, *kept)],
        "entries": examples.legend(rows),
        "looks": drawn,
    }
    numbered = list(enumerate((*cards, *needles, *kept)))
    environment = Environment(
        loader=PackageLoader("kvbench.page", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"budget": budget_words, "number": tables.number, "amount": tables.amount}
    return environment.get_template("page.html").render(
        title=folder.resolve().name,
        about=about.about(rows),
        task_columns=about.TASK_COLUMNS,
        filters=_filters(rows),
        caveats=caveats.caveats(rows, where, caveats.unfinished(folder)),
        rankings=_rankings(tables.ranking(rows, where)),
        where=where,
        forests=tables.forests(rows),
        said=tables.said,
        marks={"": "", "worse": "", **tables.MARKS},
        places=tables.PLACES,
        below=folder,
        several_models=len({row.model for row in rows}) > 1,
        several_tasks=len({row.task for row in rows}) > 1,
        costs=tables.costs(rows),
        rows=rows,
        cards=numbered[: len(cards)],
        many=len(cards) > 2 * MANY,
        strips=[(number, card) for number, card in numbered if card.axis == "strip"],
        needles=_by_title([(number, card) for number, card in numbered if card.axis == "map"]),
        kept=[(number, card) for number, card in numbered if card.axis == "kept"],
        matrices=tables.matrices(rows),
        published=[(name, Markup(table)) for name, table in published.beside_print(runs)],
        colours={line: look.colour for line, look in palette.items()},
        swatches={line: Markup(svg) for line, svg in drawn.items()},
        cut=browsed.cut,
        groups=[(group, script_json(group)) for group in browsed.groups],
        libraries=libraries(),
        css=Markup(_own("page.css")),
        script=Markup(_own("page.js")),
        data=script_json(data),
    )


def script_json(data: Any) -> Markup:  # noqa: ANN401 - whatever JSON holds
    """JSON that stands inside `<script>` and cannot leave it, whatever a model wrote."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _own(name: str) -> str:
    return (resources.files("kvbench.page") / name).read_text(encoding="utf-8")


def _by_title(cards: Sequence[tuple[int, charts.Card]]) -> list[tuple[str, list[tuple[int, charts.Card]]]]:
    """Maps of one task and model beside each other."""
    found: dict[str, list[tuple[int, charts.Card]]] = {}
    for number, card in cards:
        found.setdefault(f"{card.task} ({card.model})", []).append((number, card))
    return list(found.items())


def _filters(rows: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """The choices of the filters: fields that differ between rows."""
    budgets = sorted({row.budget for row in rows if row.budget is not None}, key=budget_order)
    values = {
        "model": list(dict.fromkeys(row.model for row in rows)),
        "task": list(dict.fromkeys(row.task for row in rows)),
        "budget": [budget_words(budget) for budget in budgets],
        "schedule": sorted({row.moments[0] for row in rows if row.moments[0]}),
    }
    return [(name, options) for name, options in values.items() if len(options) > 1]


def _rankings(rows: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Scores and NLLs are not one column."""
    kinds = [("score", [row for row in rows if not row.reads]), ("NLL", [row for row in rows if row.reads])]
    return [(name, own) for name, own in kinds if own]
