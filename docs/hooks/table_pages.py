"""What the papers print: a page for every table, and which tables print a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

from md import table as md_table

from kvbench.config.presets import store_of
from kvbench.papers import layout, published
from kvbench.papers.layout import budget_text, lay_out
from kvbench.papers.published import AVERAGE, BASELINE, Number
from kvbench.report import frames

COMMAND = "python -m kvbench.tables"


def paper_name(table: str) -> str:
    """What the paper of a table calls its method: `K-VEC`."""
    return layout.paper_label(table.partition("/")[0]).partition(" (")[0]


def page_name(table: str) -> str:
    """The page of `caote/table2`."""
    return f"tables/{table}.md"


def table_page(table: str) -> str:
    """The published table in its paper's layout, and the commands that show it and put our runs beside it."""
    shown = lay_out(table)
    title = f"{paper_name(table)}, {readable(table)}"
    return f"""---
title: {title}
hide: [toc]
---
# {title}

{shown.title.partition(": ")[2]}. Printed numbers, as the paper has them: none of these was measured with kvbench.

<div class="printed" markdown="0" data-search-exclude>
{frames.html(shown)}
</div>

    {COMMAND} show {table}
    {COMMAND} compare {table} --runs results/runs
"""


def readable(table: str) -> str:
    """`table 2` of `caote/table2`, `figure 6 (text)` of `ott/fig6_text`."""
    name = table.partition("/")[2]
    if name == "fig9_10_text":
        return "figures 9 and 10 (text)"
    head, _, tail = name.partition("_")
    short = next((short for short in _READABLE if head.startswith(short)), "")
    head = _READABLE.get(short, "") + head.removeprefix(short)
    return f"{head} ({tail.replace('_', ' ')})" if tail else head


_READABLE = {"table": "table ", "fig": "figure ", "a6": "appendix A.6", "text": "numbers in the text"}


def index_page() -> str:
    """All tables, paper by paper."""
    blocks = ["# Published tables", _INTRODUCTION]
    for paper in published.papers():
        sizes = {name: len(layout.numbers(name)) for name in layout.tables(paper)}
        blocks += [f"## {paper_name(paper)}", _listed(sizes, lambda name: f"[{readable(name)}]({name}.md)")]
    return "\n\n".join(blocks) + "\n"


def _listed(sizes: Mapping[str, int], link: Callable[[str], str]) -> str:
    rows = ((link(name), layout.layout(name).title, size) for name, size in sizes.items())
    return md_table(("table", "what it shows", "numbers:"), rows)


_INTRODUCTION = f"""What five papers print, as data: {len(published.all_numbers()):,} numbers, typed from the papers and
never mended. A printed average that does not add up stays, with a note. No number on these pages was measured with
kvbench; `compare` puts ours beside them.

    {COMMAND} list                                              # which of them can be run, and why the others cannot
    {COMMAND} show caote/table2 -o table2.tex                   # also .md, .txt, .html
    {COMMAND} compare caote/table2 --runs results/runs          # ours beside the print, and how many are missing

[`python -m kvbench.claims`](../claims.md) decides what the papers claim from runs."""


def owners(method: str, pages: Mapping[str, str]) -> list[str]:
    """The pages that a published method belongs to: its policy, the longest name it begins with, and its store.

    pages: the page of each policy's name.
    """
    found = [name for name in pages if f"{method}_".startswith(f"{name}_")]
    longer = [name for name in pages if name.startswith(f"{method}_")]
    mine = [max(found, key=len)] if found else longer[:1]
    words = method.split("_")
    parts = ["_".join(words[first:last]) for first in range(len(words)) for last in range(len(words), first, -1)]
    mine += [name for name in parts if name in pages and store_of(name)][:1]
    return list(dict.fromkeys(pages[name] for name in mine))


@cache
def methods() -> frozenset[str]:
    """Every method that a table prints."""
    return frozenset(number.method for number in published.all_numbers())


def section(page: str, printed: Collection[str]) -> list[str]:
    """Of a policy's page: printed averages beside the full cache's, and every table that prints it.

    printed: the methods that belong to the page.
    """
    found = [number for number in published.all_numbers() if number.method in printed]
    numbers = sorted(found, key=lambda n: not n.table.startswith("table"))  # before what figures and the text say
    if not numbers:
        return ["No table of the five papers prints this policy."]
    averages = [n for n in numbers if (n.task, n.metric) == (AVERAGE, "score")]
    averages.sort(key=lambda n: n.method != page)  # its variants come last
    example = layout.whole(numbers[0].name)
    return [
        *(_averages(averages) if averages else []),
        "Every table that prints it:",
        _listed(Counter(layout.whole(n.name) for n in numbers), _link),
        f"    {COMMAND} show {example}\n    {COMMAND} compare {example} --runs results/runs     # your runs beside it",
    ]


def _averages(averages: Sequence[Number]) -> list[str]:
    """A row per table, model and method, a column per budget."""
    budgets = list(dict.fromkeys(budget_text(n) for n in sorted(averages, key=lambda n: n.budget or 0)))
    printed = {(n.name, n.model, n.method, budget_text(n)): n.printed for n in averages}
    rows = [
        (
            _link(table),
            model or "not named",
            f"`{method}`",
            _full(table, model),
            *(printed.get((table, model, method, budget), "") for budget in budgets),
        )
        for table, model, method in dict.fromkeys(key[:3] for key in printed)
    ]
    columns = ("table", "model", "method", "full:", *(f"{budget or 'not given'}:" for budget in budgets))
    return ["Printed averages, beside the full cache's of the same table, by budget:", md_table(columns, rows)]


def _full(table: str, model: str) -> str:
    """The printed average of the full cache."""
    asked = (model, BASELINE, AVERAGE)
    return next((n.printed for n in published.read_table(table) if (n.model, n.method, n.task) == asked), "")


def _link(table: str) -> str:
    """The page of a table, as a policy's page links it."""
    return f"[{paper_name(table)}, {readable(table)}](../{page_name(layout.whole(table))})"
