"""The fidelity ledger, docs/ledger.yaml: where a paper, its code, its claims and this repository differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import yaml

SOURCE = Path(__file__).parents[1] / "ledger.yaml"
FIELD = re.compile(r"(scorer|value|allocator|merger|store|schedule|task)\.(\w+)")  # as entries name them
COLUMNS = {"paper": "Paper", "code": "Code", "claim": "Claim", "print": "Print", "here": "Here"}


@dataclass(frozen=True)
class Entry:
    """One difference. policies: names of conf/policy it is about; here: what kvbench does, which field changes it."""

    topic: str
    here: str = ""
    paper: str = ""
    code: str = ""
    claim: str = ""
    print: str = ""
    policies: tuple[str, ...] = ()

    @property
    def said(self) -> Iterator[tuple[str, str]]:
        """(who, what), in the order of the columns."""
        return ((words, text) for name, words in COLUMNS.items() if (text := getattr(self, name)))


@dataclass(frozen=True)
class Chapter:
    """The entries about one paper or kind of thing."""

    slug: str
    title: str
    about: str
    entries: tuple[Entry, ...]


@cache
def chapters() -> tuple[Chapter, ...]:
    """All of docs/ledger.yaml. Raises ValueError for a field that entries do not have."""
    return tuple(_chapter(slug, raw) for slug, raw in yaml.safe_load(SOURCE.read_text(encoding="utf-8")).items())


def _chapter(slug: str, raw: Mapping[str, object]) -> Chapter:
    given = raw["entries"]
    assert isinstance(given, list)
    return Chapter(slug, str(raw["title"]), str(raw["about"]), tuple(_entry(slug, one) for one in given))


def _entry(slug: str, given: Mapping[str, object]) -> Entry:
    known = {f.name for f in fields(Entry)}
    if wrong := sorted(set(given) - known):
        raise ValueError(f"ledger.yaml, {slug}: {given.get('topic')} has {', '.join(wrong)} (allowed: {sorted(known)})")
    policies = given.get("policies", [])
    assert isinstance(policies, list)
    words = {key: " ".join(str(text).split()) for key, text in given.items() if key != "policies"}
    return Entry(**words, policies=tuple(policies))


def chapter_page(chapter: Chapter, pages: Mapping[str, str]) -> str:
    """The page of a chapter; pages: the page of each policy's name."""
    lines = [f"# {chapter.title}", "", " ".join(chapter.about.split())]
    for entry in chapter.entries:
        lines += ["", f"## {entry.topic}", "", *_said(entry)]
        links = dict.fromkeys(f"[{pages[name]}](../policies/{pages[name]}.md)" for name in entry.policies)
        lines += ["", f"About {', '.join(links)}."] if links else []
    return "\n".join(lines) + "\n"


def section(entries: Sequence[Entry]) -> Iterator[str]:
    """The entries about one policy, for its page."""
    for entry in entries:
        yield f"**{entry.topic}**"
        yield ""
        yield from _said(entry)
        yield ""


def _said(entry: Entry) -> Iterator[str]:
    """A definition list: who says what."""
    for who, what in entry.said:
        yield f"- *{who}:* {what}"
