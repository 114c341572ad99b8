"""What the papers print: a page for every table, and which tables print a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from kvbench.config import slugs
from kvbench.papers import arrangement, published, render
from kvbench.papers.layout import budget_text, lay_out
from kvbench.papers.published import AVERAGE, BASELINE, Number

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
    name = max(found, key=len) if found else next((name for name in pages if name.startswith(f"{method}_")), None)
    try:
        stored = slugs.parse(method)
    except ValueError:  # a setting that a paper leaves out, such as the labels of skipped layers
        stored = None
    return list(dict.fromkeys(pages[one] for one in (name, stored and stored.store) if one in pages))


def numbers_of(page: str, pages: Mapping[str, str]) -> list[Number]:
    """Every published number of a policy's page."""
    mine = {method for method in methods() if page in owners(method, pages)}
    return [number for number in published.all_numbers() if number.method in mine]


def methods() -> set[str]:
    """Every method that a table prints."""
    return {number.method for number in published.all_numbers()}


def section(page: str, pages: Mapping[str, str]) -> Iterator[str]:
    """Lines of Markdown: where a policy is printed, and its printed averages beside the full cache's."""
    numbers = numbers_of(page, pages)
    if not numbers:
        yield "No table of the five papers prints this policy."
        return
    yield from _tables(numbers)
    averages = [n for n in numbers if n.task == AVERAGE and n.method == page]
    if averages:
        yield from _averages(averages)


def _tables(numbers: list[Number]) -> Iterator[str]:
    yield "| table | what it shows | numbers | to see it beside your runs |"
    yield "|---|---|---:|---|"
    for table, count in Counter(arrangement.whole(n.name) for n in numbers).items():
        paper, _, name = table.partition("/")
        title = arrangement.arrangement(table).title
        yield f"| [{PAPERS[paper]}, {readable(name)}](../{page_name(table)}) | {title} | {count} | `compare {table}` |"
    yield ""
    yield f"Each by `{COMMAND} show TABLE`, and `{COMMAND} compare TABLE --runs results/runs`."


def _averages(averages: list[Number]) -> Iterator[str]:
    yield ""
    yield "Printed averages, beside the full cache of the same table:"
    yield ""
    yield "| table | model | budget | full | printed |"
    yield "|---|---|---:|---:|---:|"
    for n in averages:
        full = next((o for o in published.read_table(n.name) if _same_but_full(o, n)), None)
        paper, _, name = n.name.partition("/")
        link = f"[{PAPERS[paper]}, {readable(name)}](../{page_name(arrangement.whole(n.name))})"
        model = n.model or "not named"
        yield f"| {link} | {model} | {budget_text(n) or 'none'} | {full.printed if full else '–'} | {n.printed} |"


def _same_but_full(other: Number, n: Number) -> bool:
    same = (other.model, other.task, other.metric) == (n.model, n.task, n.metric)
    return same and other.method == BASELINE
