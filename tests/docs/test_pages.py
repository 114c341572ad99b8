"""The page of a policy has its parts with idea, equation, source and fields; the ledger names things that exist."""

import dataclasses
import inspect
import re
import shlex
from pathlib import Path

import ledger_pages
import policy_pages
import pytest
from command_lines import composed, first_of
from documents import PAGES, policy_exists, read, runs
from equations import asciimath, docstring, mathjax_files
from parameters import few_fast

from kvbench.cli import main
from kvbench.config.compose import names

DOCS = Path(__file__).parents[2] / "docs"
OURS = {"Random", "Ragged", "Paged"}  # no paper has them
PLAIN = {"Ragged", "Paged"}  # nothing to compute


def test_a_part_has_an_idea_an_equation_a_source_and_the_meaning_of_every_field(parts: dict[str, type]) -> None:
    for path, part in parts.items():
        text = docstring(inspect.cleandoc(part.__doc__ or ""))
        assert text.split("\n\n")[0].endswith("."), path
        assert ("\\[" in text) == (part.__name__ not in PLAIN), path
        assert "Source: " in text or part.__name__ in OURS, path
        own = (one for one in part.__mro__ if dataclasses.is_dataclass(one))
        explained = "\n".join(inspect.cleandoc(one.__doc__ or "") for one in own)
        for field in dataclasses.fields(part):
            assert not field.init or re.search(rf"\b{field.name}\b[^:\n]*:", explained), (path, field.name)


def test_equations_are_written_as_asciimath_has_them() -> None:
    assert asciimath("c_j = ||X - v_j|| / (1 - alpha_j)") == "c_j = norm(X - v_j) / (1 - alpha_j)"
    assert asciimath('sum_(q in "group") kernel') == 'sum_(q in "group") "kernel"'
    assert asciimath("s_j <- inf") == "s_j larr oo"
    assert docstring("One.\n\n    a_j = 1\n    b = 2\n\nTwo * three.\nSource: me.") == (
        "One.\n\n\\[\na_j = 1\n\\]\n\n\\[\nb = 2\n\\]\n\nTwo \\* three.\n\nSource: me."
    )


def test_mathjax_comes_with_the_site() -> None:
    files = mathjax_files()
    assert {"mathjax/startup.js", "mathjax/input/asciimath.js", "mathjax/output/chtml.js"} <= set(files)
    assert all(path.is_file() for path in files.values())


def test_every_preset_stands_on_one_page_under_its_name() -> None:
    page_of = policy_pages.page_of()
    assert sorted(page_of) == sorted(names("policy"))
    for name, page in page_of.items():
        assert f"`{name}`" in policy_pages.page(page)


def test_the_table_of_parts_has_those_of_presets_and_wrappers() -> None:
    rows = policy_pages.parts_table()
    for part in ("KeyDiff: keep the keys", "CriticalKV: half of the budget", "AdaKV: the KV heads", "CaM: the value"):
        assert rows.count(f"| {part}") == 1


ENTRIES = [(slug, entry) for slug, chapter in ledger_pages.chapters().items() for entry in chapter["entries"]]


def test_the_ledger_speaks_of_policies_that_exist() -> None:
    for slug, entry in ENTRIES:
        assert set(entry) <= {"topic", "policies", *ledger_pages.WHO}, entry["topic"]
        assert set(entry.get("policies", ())) <= set(names("policy")), entry["topic"]
        assert slug == "evaluators" or entry["policies"], entry["topic"]
        assert ledger_pages.items(entry), entry["topic"]


COMMANDS = sorted({shlex.join(words) for page in PAGES for words in runs(read(page))})
ANSWERS = [shlex.join(words) for words in runs(read("docs/answers.md"))]
START = [shlex.join(words) for name in ("README.md", "docs/quickstart.md") for words in runs(read(name))]


@pytest.mark.parametrize("command", few_fast(COMMANDS, START, pytest.mark.slow("composes every command")))
def test_a_command_that_a_page_shows_is_accepted(command: str) -> None:
    words = shlex.split(command)
    assert composed(*first_of(words)).policy
    for field, values in (word.split("=", 1) for word in words if re.match(r"(policy|task)=[^\[{]*,", word)):
        for value in values.split(",")[1:]:
            assert policy_exists(value) if field == "policy" else value in names("task"), value


ELSEWHERE = re.compile(
    r"data_dir|hub=|path=|include_path|lm_eval|slurm|my-project|mlflow|tensorboard|stats=|longbench|scbench|loogle"
    r"|infinitebench|needlebench|aime|pg19|booksum|experiment=|pocket|kvzap|countdown|dictated|8192|watch="
)
"""Words of commands that need data, a cluster or a service, or take minutes. test_answers.py and test_examples.py run
those of their pages."""


@pytest.mark.slow("computes an example of every run")
@pytest.mark.parametrize("command", [one for one in COMMANDS if not ELSEWHERE.search(one) and one not in ANSWERS])
def test_a_command_that_a_page_shows_runs(command: str, tmp_path: Path) -> None:
    words = [word for word in shlex.split(command) if not word.startswith(("model=", "limit=", "out="))]
    if "kvpress" in command:
        pytest.importorskip("kvpress", reason="kvpress is not installed: pip install --no-deps kvpress cachetools")
    assert main([*words, "limit=1", "device=cpu", f"out={tmp_path}"]) == 0
    assert "dry_run=true" in words or [*tmp_path.glob("*/samples.jsonl")]


@pytest.mark.slow("builds the documentation")
def test_the_site_is_built_with_strict_links_and_fetches_nothing(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    root = Path(__file__).parents[2]
    build(load_config(str(root / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert (tmp_path / "policies" / "snapkv.html").is_file()
