"""A page for every policy, made from its YAML and the docstrings of its parts."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ledger_pages import section, table

from kvbench.config.compose import CONF, Config, read, read_all
from kvbench.config.documentation import (
    DECISIONS,
    budgeted,
    by_kind,
    families,
    first_sentence,
    part_name,
    required,
    selects,
    when,
)
from kvbench.config.documentation import about as comment
from kvbench.config.parts import part_class

USUAL = {"Uniform", "Drop", "Dense"}  # the default parts have no section


def page_of() -> dict[str, str]:
    """The page of each policy."""
    return {name: page for page, variants in pages().items() for name in (page, *variants)}


def pages() -> dict[str, tuple[str, ...]]:
    """Every policy that has a page, and its variants."""
    return families()


def about(name: str) -> str:
    """The comment at the top of a policy's file."""
    return comment(CONF / "policy" / f"{name}.yaml")


def index_page() -> str:
    """All policies with one sentence each, by group."""
    blocks = ["# Policies", _INTRODUCTION]
    for group, members in by_kind().items():
        rows = [(f"[`{page}`]({page}.md)", first_sentence(about(page))) for page in members]
        blocks += [f"## {group}", table(("policy", "description"), rows)]
    return "\n\n".join(blocks) + "\n"


_INTRODUCTION = """A policy is five decisions and a schedule ([how they fit together](../concepts/policy.md)).
Every name below is a file of `conf/policy/`. Its page is generated from that file and from the docstrings of its parts.
Further names need no file: a wrapper before a policy with a scorer (`caote_knorm`, `critical_snapkv`, `ada_keydiff`),
and a store with its settings after a policy that evicts (`snapkv_kivi_g32_r128`)."""


def parts_table() -> str:
    """The parts of all presets and wrappers: the sentences their modules begin with, by decision."""
    found: dict[str, set[str]] = {decision: set() for decision in DECISIONS}
    for config in (*read_all("policy").values(), *read_all("wrapper").values()):
        for decision in DECISIONS:
            if config.get(decision):
                doc = import_module(part_class(config[decision]).__module__).__doc__ or ""
                found[decision].add(doc.splitlines()[0].rstrip("."))
    rows = [(question, text) for decision, question in DECISIONS.items() for text in sorted(found[decision])]
    return table(("decision", "part"), rows)


@cache
def page(name: str) -> str:
    """The page of one policy."""
    config = read("policy", name)
    boost = 1 if any(name.endswith(f"_{other}") for other in pages()) else 2  # `snapkv` comes before `caote_snapkv`
    file = (CONF / "policy" / f"{name}.yaml").read_text(encoding="utf-8").rstrip()
    blocks = [
        f"---\ntitle: {name}\ndescription: {about(name)!r}\nsearch: {{boost: {boost}}}\n---\n# `{name}`",
        about(name),
        f"    kvbench policy={name}{' budget=256' * budgeted(config)}{required(config)}",
        *_decisions(config),
        *(_schedule(config) if selects(config) else []),
    ]
    if differences := section((name, *pages()[name])):
        blocks += ["## Differences between paper, code and numbers", *differences]
    if variants := pages()[name]:
        blocks += ["## Variants", table(("name", "description"), [(f"`{one}`", about(one)) for one in variants])]
    blocks += ["## The file", f"`conf/policy/{name}.yaml`:", f"```yaml\n{file}\n```"]
    return "\n\n".join(blocks) + "\n"


def _decisions(config: Config) -> list[str]:
    """A section for each part: its docstring and fields, by mkdocstrings."""
    blocks = []
    for decision, question in DECISIONS.items():
        given = config.get(decision)
        if not given or part_name(config, decision) in USUAL:
            continue
        blocks += [f"## {question}", _documented(given)]
        blocks += [_documented(value) for value in given.values() if isinstance(value, dict) and "_target_" in value]
    if not (selects(config) or config.get("reader")) and part_name(config, "store") == "Dense":
        blocks += ["Nothing is evicted, merged or quantized: the full cache, the baseline of every comparison."]
    return blocks


def _documented(given: Config) -> str:
    part = part_class(given)
    options = "{show_root_toc_entry: false, members: false}"
    return f"::: {part.__module__}.{part.__qualname__}\n    options: {options}"


def _schedule(config: Config) -> list[str]:
    set_by = "`schedule=`, `block=` and `decode=` change this: [schedules](../concepts/policy.md#schedules)."
    return ["## Schedule", f"{when(config)}\n{set_by}"]
