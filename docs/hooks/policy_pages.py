"""A page for every policy, made of its YAML and the docstrings of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import ledger_pages
import table_pages
from docstrings import Described, describe, yaml_value

from kvbench.config.tree import CONF, Config, names, part_class, read
from kvbench.papers import arrangement

DECISIONS = {
    "filter": "What is read at all",
    "scorer": "Which tokens matter",
    "value": "Does the value count",
    "allocator": "Who gets how much",
    "merger": "What becomes of the evicted",
    "store": "How the kept are stored",
}
USUAL = {"Uniform", "Drop", "Dense"}  # parts that say nothing of a policy
GROUPS = (
    ("Which tokens matter", lambda config: True),
    ("The value counts", lambda config: bool(config.get("value"))),
    ("Layers and heads share", lambda config: part_name(config, "allocator") != "Uniform"),
    ("The evicted are merged", lambda config: part_name(config, "merger") != "Drop"),
    ("Quantised", lambda config: part_name(config, "store") not in ("Dense", "Ragged")),
    ("The prompt is rewritten", lambda config: bool(config.get("filter"))),
    ("Everything is kept", lambda config: config == read("policy", "full")),
)


def part_name(config: Config, decision: str) -> str:
    """The class of a policy's part, `Uniform`."""
    return str((config.get(decision) or {}).get("_target_", "")).rpartition(".")[2]


@cache
def pages() -> dict[str, tuple[str, ...]]:
    """Every policy that has a page, and its variants: names that begin with its own."""
    known = sorted(names("policy"), key=len)
    found: dict[str, list[str]] = {}
    for name in known:
        base = max((page for page in found if name.startswith(f"{page}_")), key=len, default=None)
        if base is None:
            found[name] = []
        else:
            found[base].append(name)
    twin = {"headkv_r2": "headkv_r"}  # a second file of scores for the same policy
    for name, page in twin.items():
        found[page] += [name, *found.pop(name)]
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def page_of() -> dict[str, str]:
    """The page on which each policy's name is found."""
    return {name: page for page, variants in pages().items() for name in (page, *variants)}


@cache
def printed_methods() -> dict[str, set[str]]:
    """The methods of published tables that belong to each page."""
    found: dict[str, set[str]] = {name: set() for name in pages()}
    for method in table_pages.methods():
        for owner in table_pages.owners(method, page_of()):
            found[owner].add(method)
    return found


def title(name: str) -> str:
    """What papers call a policy: `SnapKV + CAOTE`."""
    return arrangement.names().labels["method"].get(name, _TITLES.get(name, name))


_TITLES = {
    "gear": "GEAR",
    "kcvc": "KCVC",
    "zipcache": "ZipCache",
    "knorm": "Key norm",
    "random": "Random",
    "full": "Full cache",
    "p2a_h2o": "H2O + P2A",
    "p2a_snapkv": "SnapKV + P2A",
    "p2a_tova": "TOVA + P2A",
    "headkv_r": "HeadKV",
}


def about(name: str) -> str:
    """The comment at the top of a policy's file."""
    lines = (CONF / "policy" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    return " ".join(comment)


def groups() -> dict[str, list[str]]:
    """The pages by what is special about them; a policy stands in the last group that it fits."""
    found: dict[str, list[str]] = {name: [] for name, _ in GROUPS}
    for page in pages():
        config = read("policy", page)
        found[[name for name, fits in GROUPS if fits(config)][-1]].append(page)
    return found


def index_page() -> str:
    """All policies and what each is, by group."""
    lines = ["# Policies", "", _INTRODUCTION]
    for group, members in groups().items():
        lines += ["", f"## {group}", "", "| policy | name | what it is |", "|---|---|---|"]
        lines += [f"| [{title(page)}]({page}.md) | `{page}` | {_first_sentence(about(page))} |" for page in members]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """A policy is five decisions and a schedule ([how they fit together](../concepts/policy.md)).
Every name below is a file of `conf/policy/`; its page is made from that file and from the docstrings of its parts,
so it says what runs. Names that have no file follow from others: `caote_` or `fastcaote_` before a policy that scores
by content (`caote_knorm`), a store and its settings behind one that evicts (`snapkv_kivi_g32_r128`)."""


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".") + "."


@cache
def page(name: str) -> str:
    """The page of one policy."""
    config = read("policy", name)
    lines = [
        "---",
        f"title: {title(name)} ({name})",
        f"description: {about(name)!r}",
        f"search: {{boost: {1 if _is_made_of_others(name) else 2}}}",  # `snapkv` is found before `caote_snapkv`
        "---",
        f"# {title(name)} <small>`{name}`</small>",
        "",
        about(name),
        "",
        *_commands(name, config),
        *_decisions(config),
        *_schedule(config),
        "## Published numbers",
        "",
        *table_pages.section(name, printed_methods()[name]),
        "",
        *_differences(name),
        *_variants(name),
        "## The file",
        "",
        f"`conf/policy/{name}.yaml`:",
        "",
        "```yaml",
        (CONF / "policy" / f"{name}.yaml").read_text(encoding="utf-8").rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


_NEEDED = {"headkv_r": " policy.allocator.importance=scores.json", "gemfilter": " policy.filter.layer=1"}


def _is_made_of_others(name: str) -> bool:
    return any(name.endswith(f"_{page}") for page in pages())


def _commands(name: str, config: Config) -> Iterator[str]:
    budget = " budget=256" if config.get("scorer") or config.get("filter") else ""
    yield f"    python -m kvbench policy={name}{budget}{_NEEDED.get(name, '')}"
    yield ""


def _decisions(config: Config) -> Iterator[str]:
    for decision, question in DECISIONS.items():
        given = config.get(decision)
        if given and part_name(config, decision) not in USUAL:
            yield f"## {question}: {part_name(config, decision)}"
            yield ""
            yield from part_section(describe(part_class(given)), f"policy.{decision}", given)
            yield from _inner(decision, given)
    if not (config.get("scorer") or config.get("filter")) and part_name(config, "store") == "Dense":
        yield "Nothing is evicted, merged or rounded: the cache is the model's own, and every comparison's baseline."
        yield ""


def _inner(decision: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Parts inside a part, such as the allocator that AdaKV wraps."""
    for key, value in given.items():
        if isinstance(value, dict) and "_target_" in value:
            inner = part_class(value)
            yield f"### {key}: {inner.__name__}"
            yield ""
            yield from part_section(describe(inner), f"policy.{decision}.{key}", value)


def part_section(part: Described, prefix: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Idea, equations, prose, source and fields of one part."""
    for text in (part.idea, part.equations, part.prose):
        if text:
            yield text
            yield ""
    if part.source:
        yield f"*Source:* {part.source}"
        yield ""
    if part.fields:
        yield from fields_table(part, prefix, given)
        yield ""


def fields_table(part: Described, prefix: str, given: Mapping[str, Any]) -> Iterator[str]:
    """The fields as one must type them, with what they may be, their default, and what this policy sets."""
    head = f"`{prefix}.`" if prefix else "field"
    yield f"| {head} | values | default | meaning |"
    yield "|---|---|---|---|"
    for one in part.fields:
        own = yaml_value(given.get(one.name, one.default))
        default = f"`{one.default}`" if one.default else "needed"
        if one.name in given and own not in (one.default, f"{one.default}.0"):
            default = f"`{own}` here, else {default}"
        yield f"| `{one.name}` | {one.allowed} | {default} | {one.meaning or 'see above'} |"


def _schedule(config: Config) -> Iterator[str]:
    schedule = config.get("schedule") or {}
    if not (config.get("scorer") or config.get("filter")):
        return
    when = "after the whole prompt"
    if part_name(config, "schedule") == "Blocks":
        when = f"after every block of {schedule.get('size', 128)} prompt tokens (`block=`)"
    decode = {
        "evict": "gives up one token for each new one",
        "grow": "keeps every new token beside the budget",
    }[schedule.get("decode", "evict")]
    late = "; the prompt stays whole until the first token was decoded" if schedule.get("late") else ""
    yield "## When"
    yield ""
    yield f"It evicts {when}{late}; decoding {decode} (`decode={schedule.get('decode', 'evict')}`)."
    yield "`schedule=`, `block=` and `decode=` set it otherwise: [schedules](../concepts/policy.md#when)."
    yield ""


def _differences(name: str) -> Iterator[str]:
    mine = {name, *pages()[name]}
    entries = [entry for chapter in ledger_pages.chapters() for entry in chapter.entries if mine & set(entry.policies)]
    if entries:
        yield "## Where paper, code and numbers differ"
        yield ""
        yield from ledger_pages.section(entries)


def _variants(name: str) -> Iterator[str]:
    if not pages()[name]:
        return
    yield "## Variants"
    yield ""
    yield "| name | what it is |"
    yield "|---|---|"
    for variant in pages()[name]:
        yield f"| `{variant}` | {about(variant)} |"
    yield ""
