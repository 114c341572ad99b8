"""Hooks for MkDocs: pages of policies and of the ledger, generated at build time from YAML and docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import evaluator_tables
import ledger_pages
import policy_pages
from equations import asciimath, mathjax_files
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

MADE = {
    "<!-- table: longbench -->": evaluator_tables.longbench,
    "<!-- table: ruler -->": evaluator_tables.ruler,
    "<!-- table: parts -->": policy_pages.parts_table,
}
FIGURES = Path(__file__).parents[2] / "results/smollm2"
FETCHED = "https://unpkg.com/iframe-worker/shim"
_LOADED = re.compile(
    r"""(?:\ssrc(?:set)?=|<link(?=[^>]*(?:stylesheet|preload|preconnect|icon|dns-prefetch))[^>]*\shref=|url\(|@import\s+)"""
    r"""["']?((?:https?:)?//[^"')\s>]+)"""
)
_PICTURE = re.compile(r"^<!-- picture: ([\w/.]+) -->$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation, below their titles in mkdocs.yml."""
    policies = {
        group: {name: f"policies/{name}.md" for name in members}
        for group, members in policy_pages.groups().items()
        if members
    }
    ledger = {chapter["title"]: f"ledger/{slug}.md" for slug, chapter in ledger_pages.chapters().items()}
    made: dict[str, Mapping[str, Any]] = {"Policies": policies, "Ledger": ledger}
    assert config.nav is not None
    for entry in config.nav:
        for title in made.keys() & entry.keys():
            entry[title] = [*entry[title], *_listed(made[title])]
    return config


def _listed(pages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Titles and their pages in the format of MkDocs."""
    return [{title: _listed(own) if isinstance(own, Mapping) else own} for title, own in pages.items()]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, figures of results, and MathJax."""
    for path, text in generated():
        files.append(File.generated(config, path, content=text))
    for figure in sorted(FIGURES.glob("*.svg")):
        files.append(File.generated(config, f"smollm2/{figure.name}", abs_src_path=str(figure)))
    for path, source in mathjax_files().items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def generated() -> Iterator[tuple[str, str]]:
    """(path, Markdown) of every generated page."""
    yield "policies/index.md", policy_pages.index_page()
    for name in policy_pages.pages():
        yield f"policies/{name}.md", policy_pages.page(name)
    for slug, chapter in ledger_pages.chapters().items():
        yield f"ledger/{slug}.md", ledger_pages.chapter_page(chapter, policy_pages.page_of())


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert tables and pictures, and mark `eq` blocks for MathJax."""
    markdown = markdown.replace("](../results/smollm2/", "](smollm2/")  # a link that GitHub follows, to a copied figure
    markdown = _PICTURE.sub(lambda match: _picture(match.group(1)), markdown)
    for mark, text in MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, text())
    return re.sub(r"^```eq\n(.*?)^```$", lambda m: _equations(m.group(1)), markdown, flags=re.MULTILINE | re.DOTALL)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Use our own search script, because the theme would load one from another host."""
    return output.replace(FETCHED, get_relative_url("javascripts/local-search.js", page.url))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for pages without Markdown, such as 404.html."""
    return output_content.replace(FETCHED, "javascripts/local-search.js")


def on_post_build(config: MkDocsConfig) -> None:
    """Raise an error if a page loads a file from another host."""
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css") and (found := fetched(file.read_text(encoding="utf-8"))):
            raise PluginError(f"{file.relative_to(config.site_dir)} would be loaded from another host: {found[0]}")


def fetched(text: str) -> list[str]:
    """The files that a browser would load from another host for a page or a style sheet; links do not count."""
    return [match.group(1) for match in _LOADED.finditer(text)]


def _picture(name: str) -> str:
    """An SVG inside the page, so that it uses the text colour of the page."""
    svg = Path(__file__).parents[1] / name
    return f'<figure class="picture">{svg.read_text(encoding="utf-8")}</figure>'


def _equations(text: str) -> str:
    return "\n\n".join(f"\\[\n{asciimath(line)}\n\\]" for line in text.splitlines() if line.strip())
