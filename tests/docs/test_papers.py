"""Quotations and citations of the five papers are in their texts, ../shared/papers; skipped where these are absent."""

import inspect
import re
import typing
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from kvbench.config.compose import load

ROOT = Path(__file__).parents[2]
PAPERS = ROOT.parent / "shared" / "papers"
NAMES = {"CAOTE": "caote", "CAKE": "cake", "K-VEC": "kvec", "D2O": "d2o", "OTT": "ott"}
IDS = {"2504.14051": "caote", "2503.12491": "cake", "2406.13035": "d2o", "2505.10938": "ott", **NAMES}
HEADING = re.compile(r"^(?:\d+ )?[#*_ ]*((?:\d|[A-H])(?:\.\d+)*)\.?[*_]* +\**[A-Z][^|.=]{2,90}$", re.MULTILINE)
CITED = re.compile(
    r"\b(section|appendix|table|figure|algorithm|equation|eq)s?\.?((?:,? ?(?:and |-)?[A-H]?\d*(?:\.\d+)*\b)+)"
)
EQUATION = re.compile(r"\\tag\{(\d+)\}|(?:[Ee]q|[Ee]quation)s?\.? ?\(?(\d+)|\((\d\d?)\) *(?:\||\$\$)?$", re.MULTILINE)
pytestmark = pytest.mark.skipif(not PAPERS.is_dir(), reason="needs ../shared/papers")


@cache
def paper(slug: str) -> str:
    return (PAPERS / f"{slug}.txt").read_text(encoding="utf-8")


def letters(text: str) -> str:
    """Letters and digits alone, without marks of HTML and LaTeX, and without the numbers of lines."""
    return re.sub(r"(?m)^ *\d+ |</?\w+>|\\[a-z]+|[^a-z0-9]", "", text.lower())


def order(number: str) -> list[int]:
    """Sections in the order of a paper: appendices follow the numbers."""
    return [int(one) if one.isdigit() else ord(one) for one in number.split(".")]


@cache
def sections(slug: str) -> list[tuple[str, str]]:
    """(number, text) of each section; of the text before the first heading, 0. Some headings are lost in the text."""
    pieces = [("0", paper(slug)[: next(HEADING.finditer(paper(slug))).start()])]
    marks = [*HEADING.finditer(paper(slug))]
    for mark, end in zip(marks, [*(m.start() for m in marks[1:]), len(paper(slug))], strict=True):
        if order(mark[1]) > order(pieces[-1][0]):
            pieces.append((mark[1], paper(slug)[mark.start() : end]))
        else:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + paper(slug)[mark.start() : end])
    return pieces


def within(slug: str, number: str) -> str:
    """The text of a section with those below it; of a section whose heading is lost, the text around its place."""
    found = [text for own, text in sections(slug) if f"{own}.".startswith(f"{number}.")]
    return "".join(found) or [text for own, text in sections(slug) if order(own) < order(number)][-1]


def cited(text: str) -> list[tuple[str, str]]:
    """(kind, number) of everything that a text cites: section 4.2, tables 7, 8."""
    return [
        ("section" if kind == "appendix" else kind, number)
        for kind, numbers in CITED.findall(text)
        for number in re.findall(r"[A-H]?\d*(?:\.\d+)*", numbers)
        if number
    ]


def exists(slug: str, kind: str, number: str) -> bool:
    if kind in ("eq", "equation"):
        return int(number) <= max(int(one) for found in EQUATION.findall(paper(slug)) for one in found if one)
    if kind != "section":
        return re.search(rf"(?i){kind} ?{number}\b", paper(slug)) is not None
    size = len(order(number))
    same = [order(one)[:size] for one, _ in sections(slug) if order(one)[: size - 1] == order(number)[:-1]]
    return any(len(one) == size and one >= order(number) for one in same)


CLAIMS = [
    (NAMES[one["source"].partition(",")[0]], one)
    for file in (ROOT / "results" / "paper").glob("*/claims.yaml")
    for one in load(file)["claims"]
    if one["source"].partition(",")[0] in NAMES
]


def test_a_claim_is_a_sentence_of_the_section_that_it_names_or_says_that_it_is_ours() -> None:
    assert len(CLAIMS) > 40
    wrong = []
    for slug, claim in CLAIMS:
        if "ours, not the paper's words" in claim.get("note", ""):
            continue
        places = [number for kind, number in cited(claim["source"]) if kind == "section"]
        texts = [within(slug, number) for number in places] or [paper(slug)]
        wrong += [] if any(letters(claim["claim"]) in letters(text) for text in texts) else [claim["name"]]
    assert wrong == []


def test_cited_tables_and_sections_of_papers_exist() -> None:
    files = [
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "docs" / "ledger.yaml",
        *(ROOT / "results" / "paper").rglob("*.yaml"),
    ]
    files += [file for name in ("conf", "policies", "kvbench") for file in (ROOT / name).rglob("*.[py]*")]
    found, wrong = 0, []
    for text in [file.read_text(encoding="utf-8") for file in files if file.suffix in (".md", ".yaml", ".py")]:
        for name, rest in re.findall(rf"({'|'.join(IDS)})\b(?=([^;|]{{0,120}}))", text):
            own = re.split(rf"(?<!eq)\. |\n\n|arXiv|SnapKV|{'|'.join(IDS)}", " ".join(rest.split()))[0]
            for kind, number in cited(own):
                found += 1
                wrong += [] if exists(IDS[name], kind, number) else [(name, kind, number, rest)]
    assert wrong == []
    assert found > 50


def test_a_table_is_in_the_section_that_its_layout_names() -> None:
    wrong, found = [], 0
    for slug in NAMES.values():
        for name, table in load(ROOT / "results" / "paper" / slug / "layout.yaml").items():
            if (number := re.fullmatch(r"table(\d+).*", name)) and isinstance(table, dict) and "section" in table:
                text, found = within(slug, str(table["section"])), found + 1
                lost = len(text) < 100  # of some sections the text has the heading alone
                wrong += [] if lost or re.search(rf"(?i)table ?{number[1]}\b", text) else [(slug, name)]
    assert wrong == []
    assert found > 30


def named(choices: Sequence[object], text: str) -> bool:
    """Whether a text has all these words."""
    return bool(choices) and all(re.search(rf"\b{one}\b", text.lower()) for one in choices)


def test_the_section_that_alone_names_all_choices_of_a_field_is_cited(parts: dict[str, type]) -> None:
    asked = 0
    for path, part in parts.items():
        source = " ".join(inspect.cleandoc(part.__doc__ or "").partition("Source:")[2].split())
        slug = next((one for name, one in IDS.items() if name in source), None)
        for name, hint in typing.get_type_hints(part).items() if slug else ():
            choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
            homes = [own for own, text in sections(slug) if named(choices, text)]
            if len(homes) == 1:
                asked += 1
                assert ("section", homes[0]) in cited(source), (path, name, homes)
    assert asked
