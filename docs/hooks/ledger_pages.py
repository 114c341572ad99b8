"""The fidelity ledger, docs/ledger.yaml: where a paper, its code, its claims and this repository differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SOURCE = Path(__file__).parents[1] / "ledger.yaml"
WHO = ("paper", "code", "claim", "print", "here")
Entry = Mapping[str, Any]
"""One difference: topic, policies (names of conf/policy), and a text for some of `WHO`."""


@cache
def chapters() -> Mapping[str, Mapping[str, Any]]:
    """All of docs/ledger.yaml: title, about and entries of each chapter, by its slug."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    return found


def chapter_page(chapter: Mapping[str, Any], pages: Mapping[str, str]) -> str:
    """The page of a chapter. pages: the page of each policy."""
    blocks = [f"# {chapter['title']}", " ".join(chapter["about"].split())]
    for entry in chapter["entries"]:
        blocks += [f"## {entry['topic']}", items(entry)]
        links = dict.fromkeys(f"[{pages[name]}](../policies/{pages[name]}.md)" for name in entry.get("policies", ()))
        blocks += [f"About {', '.join(links)}."] if links else []
    return "\n\n".join(blocks) + "\n"


def section(policies: Sequence[str]) -> list[str]:
    """The entries about some policies, for their page."""
    entries = [entry for chapter in chapters().values() for entry in chapter["entries"]]
    own = [entry for entry in entries if {*policies} & {*entry.get("policies", ())}]
    return [block for entry in own for block in (f"**{entry['topic']}**", items(entry))]


def items(entry: Entry) -> str:
    """The texts of an entry as a list."""
    return "\n".join(f"- *{who.capitalize()}:* {' '.join(entry[who].split())}" for who in WHO if who in entry)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; columns with a name that ends in a colon are right-aligned."""
    head = f"| {' | '.join(name.removesuffix(':') for name in columns)} |"
    rule = f"|{'|'.join('---:' if name.endswith(':') else '---' for name in columns)}|"
    return "\n".join([head, rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
