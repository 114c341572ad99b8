"""What the papers print: a page for every table, and which tables print a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cache

from kvbench.config import slugs
from kvbench.papers import arrangement, published
from kvbench.papers.layout import budget_text, lay_out
from kvbench.papers.published import AVERAGE, BASELINE, Number
from kvbench.report import render

PAPERS = {"cake": "CAKE", "caote": "CAOTE", "d2o": "D2O", "kvec": "K-VEC", "ott": "OTT"}
COMMAND = "python -m kvbench.tables"


def page_name(table: str) -> str:
    """The page of `caote/table2`."""
    return f"tables/{table}.md"


def table_page(table: str) -> str:
    """The published table in its paper's layout, and the commands that show it and put our runs beside it."""
    grid = lay_out(table)
    paper, _, name = table.partition("/")
    return f"""---
title: {PAPERS[paper]}, {readable(name)}
hide: [toc]
---
# {PAPERS[paper]}, {readable(name)}

{grid.title}. Printed numbers, as the paper has them: none of these was measured with kvbench.

<div class="printed" markdown="0" data-search-exclude>
{render.html(grid)}
</div>

    {COMMAND} show {table}
    {COMMAND} compare {table} --runs results/runs
    {COMMAND} bytes {table}
"""


def readable(name: str) -> str:
    """`table 2` of `table2`, `figure 6 (text)` of `fig6_text`."""
    if name == "fig9_10_text":
        return "figures 9 and 10 (text)"
    head, _, tail = name.partition("_")
    for short, long in _READABLE.items():
        if head.startswith(short):
            head = long + head.removeprefix(short)
            break
    return f"{head} ({tail.replace('_', ' ')})" if tail else head


_READABLE = {"table": "table ", "fig": "figure ", "a6": "appendix A.6", "text": "numbers in the text"}


def index_page() -> str:
    """All tables, paper by paper."""
    lines = ["# Published tables", "", _INTRODUCTION]
    for paper in published.papers():
        lines += ["", f"## {PAPERS[paper]}", "", "| table | what it shows | numbers |", "|---|---|---:|"]
        for table in arrangement.tables(paper):
            name = table.partition("/")[2]
            plan, size = arrangement.arrangement(table), len(arrangement.numbers(table))
            lines.append(f"| [{readable(name)}]({paper}/{name}.md) | {plan.title} | {size} |")
    return "\n".join(lines) + "\n"


_INTRODUCTION = f"""What five papers print, as data: {len(published.all_numbers()):,} numbers, typed from the papers and
never mended. A printed average that does not add up stays, with a note. No number on these pages was measured with
kvbench; `compare` puts ours beside them.

    {COMMAND} list                                              # which of them can be run, and why the others cannot
    {COMMAND} show caote/table2 -o table2.tex                   # also .md, .csv, .html
    {COMMAND} compare caote/table2 --runs results/runs          # ours beside the print, and commands for the holes

What the papers claim is held against these numbers by [`python -m kvbench.claims`](../claims.md)."""


def owners(method: str, pages: Mapping[str, str]) -> list[str]:
    """The pages that a published method belongs to: its policy, the longest name it begins with, and its store.

    pages: the page of each policy's name.
    """
    found = [name for name in pages if f"{method}_".startswith(f"{name}_")]
    longer = [name for name in pages if name.startswith(f"{method}_")]
    mine = [max(found, key=len)] if found else longer[:1]
    try:
        stored = slugs.parse(method)
    except ValueError:  # a setting that a paper leaves out, such as the labels of skipped layers
        stored = None
    if stored is not None and stored.store in pages:
        mine.append(stored.store)
    return list(dict.fromkeys(pages[name] for name in mine))


@cache
def methods() -> frozenset[str]:
    """Every method that a table prints."""
    return frozenset(number.method for number in published.all_numbers())


def section(page: str, printed: Collection[str]) -> Iterator[str]:
    """Lines of Markdown: a policy's printed averages beside the full cache's, and every table that prints it.

    printed: the methods that belong to its page.
    """
    found = [number for number in published.all_numbers() if number.method in printed]
    numbers = sorted(found, key=lambda n: not n.table.startswith("table"))  # before what figures and the text say
    if not numbers:
        yield "No table of the five papers prints this policy."
        return
    averages = [n for n in numbers if (n.task, n.metric) == (AVERAGE, "score")]
    if averages:
        yield from _averages(averages, page)
    yield from _tables(numbers)


def _averages(averages: list[Number], page: str) -> Iterator[str]:
    """A row per table and model, a column per budget: of the policy itself, then of its variants."""
    own = [n for n in averages if n.method == page]
    for words, numbers in (("", own), (" of its variants" if own else "", [n for n in averages if n not in own])):
        if numbers:
            yield f"Printed averages{words}, beside the full cache's of the same table, by budget:"
            yield ""
            yield from _by_budget(numbers)
            yield ""


def _by_budget(averages: list[Number]) -> Iterator[str]:
    budgets = list(dict.fromkeys(budget_text(n) for n in sorted(averages, key=lambda n: n.budget or 0)))
    several = len({n.method for n in averages}) > 1
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for n in averages:
        rows.setdefault((n.name, n.model, n.method), {})[budget_text(n)] = n.printed
    yield f"| table | model |{' method |' * several} full | {' | '.join(budget or 'not given' for budget in budgets)} |"
    yield f"|---|---|{'---|' * several}---:|" + "---:|" * len(budgets)
    for (table, model, method), found in rows.items():
        cells = " | ".join(found.get(budget, "") for budget in budgets)
        named = f" `{method}` |" * several
        yield f"| {_link(table)} | {model or 'not named'} |{named} {_full(table, model)} | {cells} |"


def _full(table: str, model: str) -> str:
    """The printed average of the full cache."""
    for n in published.read_table(table):
        if (n.model, n.method, n.task) == (model, BASELINE, AVERAGE):
            return n.printed
    return ""


def _link(table: str) -> str:
    """The page of a table, as a policy's page links it."""
    paper, _, name = table.partition("/")
    return f"[{PAPERS[paper]}, {readable(name)}](../{page_name(arrangement.whole(table))})"


def _tables(numbers: list[Number]) -> Iterator[str]:
    yield "Every table that prints it:"
    yield ""
    yield "| table | what it shows | numbers |"
    yield "|---|---|---:|"
    for table, count in Counter(arrangement.whole(n.name) for n in numbers).items():
        yield f"| {_link(table)} | {arrangement.arrangement(table).title} | {count} |"
    example = arrangement.whole(numbers[0].name)
    yield ""
    yield f"    {COMMAND} show {example}"
    yield f"    {COMMAND} compare {example} --runs results/runs     # your runs beside it"
