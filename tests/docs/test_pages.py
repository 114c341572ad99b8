"""A policy's page says its idea, equation, source, fields and published numbers; the ledger speaks of what exists."""

import re
import shlex
from functools import cache
from pathlib import Path

import ledger_pages
import pages
import policy_pages
import pytest
import table_pages
import yaml
from command_lines import composed, first_of
from docstrings import Described, describe

from kvbench.config.tree import CONF, load, names, part_class, read
from kvbench.papers import published
from kvbench.tasks.niah import Niah

DOCS = Path(__file__).parents[2] / "docs"
OURS = {"Random", "Ragged"}  # no paper has them
PLAIN = {"Ragged"}  # nothing to compute
FIELD = re.compile(
    r"(?:scorer|value|allocator|merger|store|schedule|task)\.(\w+)"
)  # as entries of the ledger name them
WITHOUT_A_POLICY = {"lococo", "pyramidinfer"}  # printed methods that kvbench leaves out: README


@cache
def parts() -> dict[str, Described]:
    """Every part that a policy of conf/policy has and that is worth a section, by its path."""
    found = {}
    for name in names("policy"):
        config = read("policy", name)
        for decision in policy_pages.DECISIONS:
            if (given := config.get(decision)) and policy_pages.part_name(config, decision) not in policy_pages.USUAL:
                found[given["_target_"]] = describe(part_class(given))
    return found


@pytest.mark.parametrize("path", sorted(parts()))
def test_a_part_says_its_idea_its_equation_its_source_and_every_field(path: str) -> None:
    part = parts()[path]
    assert part.idea.endswith(".")
    assert ("<math" in part.equations) == (part.name not in PLAIN)
    assert part.source or part.name in OURS
    assert [field.name for field in part.fields if not field.meaning] == []


def test_every_preset_stands_on_one_page_under_its_name() -> None:
    page_of = policy_pages.page_of()
    assert sorted(page_of) == sorted(names("policy"))
    for name, page in page_of.items():
        assert f"`{name}`" in policy_pages.page(page)


def test_the_table_of_parts_has_those_of_presets_and_wrappers() -> None:
    rows = policy_pages.parts_table()
    for part in ("KeyDiff: keep the keys", "CriticalKV: half of the budget", "AdaKV: the KV heads", "CaM: the value"):
        assert rows.count(f"| {part}") == 1


def test_a_default_with_line_breaks_is_typed_as_in_yaml() -> None:
    rows = policy_pages.fields_table(describe(Niah), "", {}).splitlines()
    (row,) = (row for row in rows if row.startswith("| `frame` |"))
    assert row.count(" | ") == 3
    assert yaml.safe_load(row.split(" | ")[2].strip("`")) == Niah.frame


def test_every_published_method_is_on_a_page_or_left_out_on_purpose() -> None:
    nowhere = {m for m in table_pages.methods() if not table_pages.owners(m, policy_pages.page_of())}
    assert nowhere == WITHOUT_A_POLICY


def test_a_policys_page_has_what_was_printed_of_it() -> None:
    page = policy_pages.page("snapkv")
    (number,) = [  # CAKE, table 5: Llama-2-7B-Chat at 128, retyped from the paper
        n for n in published.read_table("cake/table5") if (n.method, n.task, n.budget) == ("snapkv", "avg", 128)
    ]
    assert number.printed == "28.09"
    (row,) = [line for line in page.splitlines() if "[CAKE, table 5]" in line and "| Llama-2-7B-Chat |" in line]
    assert "| 33.07 |" in row  # of the full cache
    assert "| 28.09 |" in row
    assert "python -m kvbench.tables show" in page


ENTRIES = [(slug, entry) for slug, chapter in ledger_pages.chapters().items() for entry in chapter["entries"]]


def test_the_ledger_speaks_of_policies_and_fields_that_exist() -> None:
    known = {field.name for part in parts().values() for field in part.fields}
    known |= {"order", "late"} | {key for name in names("task") for key in load(CONF / "task" / f"{name}.yaml")}
    assert any(FIELD.findall(entry["here"]) for _, entry in ENTRIES if "here" in entry)
    for slug, entry in ENTRIES:
        assert set(entry) <= {"topic", "policies", *ledger_pages.WHO}, entry["topic"]
        assert set(entry.get("policies", ())) <= set(names("policy")), entry["topic"]
        assert slug == "evaluators" or entry["policies"], entry["topic"]
        said = ledger_pages.said(entry)
        assert said, entry["topic"]
        assert set(FIELD.findall(said)) <= known, entry["topic"]


def test_what_a_page_would_fetch_from_elsewhere_is_found_and_links_are_not() -> None:
    elsewhere = [
        '<script src="https://x.org/a.js">',
        '<link rel="stylesheet" href="//x.org/a.css">',
        "url(https://x.org/f)",
    ]
    assert [len(pages.fetched(text)) for text in elsewhere] == [1, 1, 1]
    at_home = ['<a href="https://arxiv.org/abs/1">', '<link rel="canonical" href="https://x.org">', '<img src="a.svg">']
    assert [pages.fetched(text) for text in at_home] == [[], [], []]


def asked() -> list[str]:
    """Every `python -m kvbench ...` of a code block of the pages, its comment aside."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "extend")
    lines = (line.partition(" #")[0].strip() for text in texts for line in text.splitlines())
    return [line for line in lines if line.startswith("python -m kvbench ") and "--help" not in line]


@pytest.mark.parametrize("command", sorted(set(asked())))
def test_a_command_that_a_page_shows_is_accepted(command: str) -> None:
    assert composed(*first_of(shlex.split(command)[3:])).policy


@pytest.mark.slow("builds the documentation")
def test_the_site_is_built_with_strict_links_and_fetches_nothing(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    root = Path(__file__).parents[2]
    build(load_config(str(root / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert (tmp_path / "policies" / "snapkv.html").is_file()
