"""MkDocs hooks: pages of policies, of the ledger and of all results, made at build time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import evaluator_tables
import ledger_pages
import policy_pages
import results_page
from equations import equations, mathjax_files
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from kvbench.config.documentation import by_kind

TABLES = {
    "<!-- table: longbench -->": evaluator_tables.longbench,
    "<!-- table: ruler -->": evaluator_tables.ruler,
    "<!-- table: parts -->": policy_pages.parts_table,
    "<!-- text: safe sizes -->": results_page.counts,
}
DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "results"
SEARCH = "https://unpkg.com/iframe-worker/shim"  # the theme's script for searching without a server
OWN_SEARCH = "javascripts/local-search.js"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation, below the titles in mkdocs.yml."""
    groups = {group: members for group, members in by_kind().items() if members}
    policies = {group: {name: f"policies/{name}.md" for name in members} for group, members in groups.items()}
    ledger = {chapter["title"]: f"ledger/{slug}.md" for slug, chapter in ledger_pages.chapters().items()}
    made: dict[str, Mapping[str, Any]] = {"Policies": policies, "Ledger": ledger}
    assert config.nav is not None
    for entry in config.nav:
        for title in made.keys() & entry.keys():
            entry[title] = [*entry[title], *_listed(made[title])]
    return config


def _listed(pages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Titles and the pages below them, in the format of MkDocs."""
    return [{title: _listed(own) if isinstance(own, Mapping) else own} for title, own in pages.items()]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, figures of results, and MathJax."""
    for path, text in generated():
        files.append(File.generated(config, path, content=text))
    figures = {f"{figure.parent.name}/{figure.name}": figure for figure in sorted(RESULTS.glob("*/*.svg"))}
    copies = figures | mathjax_files()
    for path, source in copies.items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def generated() -> Iterator[tuple[str, str]]:
    """(path, text) of every generated page, and of the examples of every run in results/."""
    for run, examples in results_page.samples().items():
        yield f"all_results/{run}.csv", examples
    yield "policies/index.md", policy_pages.index_page()
    for name in policy_pages.pages():
        yield f"policies/{name}.md", policy_pages.page(name)
    for slug, chapter in ledger_pages.chapters().items():
        yield f"ledger/{slug}.md", ledger_pages.chapter_page(chapter, policy_pages.page_of())


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert tables and pictures, and mark `eq` blocks for MathJax."""
    # a link that GitHub follows, to a copied figure
    markdown = re.sub(r"\]\(\.\./results/(\w+/\w+\.svg)\)", r"](\1)", markdown)
    markdown = re.sub(r"^<!-- picture: ([\w/.]+) -->$", lambda m: _picture(m.group(1)), markdown, flags=re.MULTILINE)
    for mark, text in TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, text())
    markdown = re.sub(r"^<!-- results: (\w+) -->$", lambda m: _track(m.group(1)), markdown, flags=re.MULTILINE)
    return re.sub(r"^```eq\n(.*?)^```$", lambda m: equations(m.group(1)), markdown, flags=re.MULTILINE | re.DOTALL)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Replace the theme's search script, which would be loaded from another host."""
    return output.replace(SEARCH, get_relative_url(OWN_SEARCH, page.url))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for pages that are not Markdown, such as 404.html."""
    return output_content.replace(SEARCH, OWN_SEARCH)


def _track(name: str) -> str:
    return f"## {results_page.TRACKS[name]}\n\n{results_page.track_table(name)}"


def _picture(name: str) -> str:
    """An SVG inside the page, so that it takes its text colour from the page."""
    return f'<figure class="picture">{(DOCS / name).read_text(encoding="utf-8")}</figure>'
