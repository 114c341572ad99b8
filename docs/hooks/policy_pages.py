"""A page for every policy, generated from its YAML and the docstrings of its parts."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import ledger_pages
from md import table

from kvbench.config.tree import CONF, Config, names, part_class, read

DECISIONS = {
    "pre_pass": "Extra forward passes",
    "scorer": "Scores of tokens",
    "value": "Use of values",
    "selection": "Units of selection",
    "allocator": "Budgets of layers and heads",
    "merger": "Merging of evicted tokens",
    "store": "Storage of kept tokens",
    "reader": "Tokens that a decoded query reads",
}
USUAL = {"Uniform", "Drop", "Dense"}  # defaults, which are not described on the page of a policy
GROUPS = (
    ("Scores of tokens", lambda config: True),
    ("Value-aware", lambda config: bool(config.get("value"))),
    ("Budgets of layers and heads", lambda config: part_name(config, "allocator") != "Uniform"),
    ("Merging", lambda config: part_name(config, "merger") != "Drop"),
    ("Quantized stores", lambda config: part_name(config, "store") not in ("Dense", "Ragged")),
    ("Extra forward passes", lambda config: bool(config.get("pre_pass"))),
    ("Sparse attention", lambda config: bool(config.get("reader"))),
    ("Baseline", lambda config: config == read("policy", "full")),
)


def part_name(config: Config, decision: str) -> str:
    """The class of a policy's part, `Uniform`."""
    return str((config.get(decision) or {}).get("_target_", "")).rpartition(".")[2]


@cache
def pages() -> dict[str, tuple[str, ...]]:
    """Every policy with a page, and its variants: policies with a name that begins with its name."""
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


def about(name: str) -> str:
    """The comment at the top of a policy's file."""
    lines = (CONF / "policy" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    return " ".join(comment)


def groups() -> dict[str, list[str]]:
    """The pages by group; a policy belongs to the last group that matches it."""
    found: dict[str, list[str]] = {name: [] for name, _ in GROUPS}
    for page in pages():
        config = read("policy", page)
        found[[name for name, fits in GROUPS if fits(config)][-1]].append(page)
    return found


def index_page() -> str:
    """The page with all policies, by group."""
    blocks = ["# Policies", _INTRODUCTION]
    for group, members in groups().items():
        rows = ((f"[`{page}`]({page}.md)", _first_sentence(about(page))) for page in members)
        blocks += [f"## {group}", table(("policy", "description"), rows)]
    return "\n\n".join(blocks) + "\n"


_INTRODUCTION = """A policy consists of five decisions and a schedule; [Policies](../concepts/policy.md) explains them.
Every name below is a file in `conf/policy/`. Its page is generated from this file and from the docstrings of its parts.
Further names are composed: a wrapper before a policy with a scorer (`caote_knorm`, `critical_snapkv`, `ada_keydiff`),
or a store with its settings after a policy that evicts (`snapkv_kivi_g32_r128`)."""


def parts_table() -> str:
    """The parts of all presets and wrappers by decision: the first lines of their modules' docstrings."""
    found: dict[str, set[str]] = {decision: set() for decision in DECISIONS}
    for config in (read(group, name) for group in ("policy", "wrapper") for name in names(group)):
        for decision in DECISIONS:
            if config.get(decision):
                doc = import_module(part_class(config[decision]).__module__).__doc__ or ""
                found[decision].add(doc.splitlines()[0].rstrip("."))
    rows = [(question, text) for decision, question in DECISIONS.items() for text in sorted(found[decision])]
    return table(("decision", "part"), rows)


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".") + "."


@cache
def page(name: str) -> str:
    """The page of one policy."""
    config = read("policy", name)
    budgeted = _chooses(config) or "reader" in config
    boost = 1 if any(name.endswith(f"_{other}") for other in pages()) else 2  # `snapkv` comes before `caote_snapkv`
    file = (CONF / "policy" / f"{name}.yaml").read_text(encoding="utf-8").rstrip()
    blocks = [
        f"---\ntitle: {name}\ndescription: {about(name)!r}\nsearch: {{boost: {boost}}}\n---\n# `{name}`",
        about(name),
        f"    python -m kvbench policy={name}{' budget=256' * budgeted}{_needed(config)}",
        *_decisions(config),
        *(_schedule(config) if _chooses(config) else []),
    ]
    if differences := ledger_pages.section((name, *pages()[name])):
        blocks += ["## Where paper, code and numbers differ", *differences]
    if variants := pages()[name]:
        blocks += ["## Variants", table(("name", "description"), ((f"`{one}`", about(one)) for one in variants))]
    blocks += ["## The file", f"`conf/policy/{name}.yaml`:", f"```yaml\n{file}\n```"]
    return "\n\n".join(blocks) + "\n"


def _needed(config: Config) -> str:
    """Required fields of a policy on the command line: files, and the layer at which GemFilter filters."""
    parts = {part: given for part, given in config.items() if isinstance(given, dict)}
    files = [(part, name) for part, given in parts.items() for name, value in given.items() if value == ""]
    layer = " policy.pre_pass.layer=1" * ("layer" in parts.get("pre_pass", {}))
    return "".join(f" policy.{part}.{name}=FILE" for part, name in files) + layer


def _chooses(config: Config) -> bool:
    """Whether a policy selects tokens."""
    return bool(config.get("scorer") or config.get("pre_pass"))


def _decisions(config: Config) -> list[str]:
    """A section for each part: its docstring and fields, by mkdocstrings."""
    blocks = []
    for decision, question in DECISIONS.items():
        given = config.get(decision)
        if not given or part_name(config, decision) in USUAL:
            continue
        blocks += [f"## {question}", _documented(given)]
        blocks += [_documented(value) for value in given.values() if isinstance(value, dict) and "_target_" in value]
    if not (_chooses(config) or config.get("reader")) and part_name(config, "store") == "Dense":
        blocks += ["No token is evicted, merged or rounded. This is the baseline of every comparison."]
    return blocks


def _documented(given: Config) -> str:
    part = part_class(given)
    options = "{show_root_toc_entry: false, members: false}"
    return f"::: {part.__module__}.{part.__qualname__}\n    options: {options}"


def _schedule(config: Config) -> list[str]:
    schedule = config.get("schedule") or {}
    when = "after the whole prompt"
    if part_name(config, "schedule") == "Blocks":
        when = f"after every block of {schedule.get('size', 128)} prompt tokens (`block=`)"
    rule = schedule.get("decode", "evict")
    decode = "each new token replaces one token" if rule == "evict" else "new tokens are kept in addition to the budget"
    if (every := schedule.get("every", 1)) > 1:
        decode = f"{every} tokens are evicted after every {every} new tokens"
    if schedule.get("protect") == "prompt":
        decode += ", but no token of the prompt"
    late = ", after the first token has been decoded" if schedule.get("late") else ""
    change = "Change this with `schedule=`, `block=` and `decode=`; see [schedules](../concepts/policy.md#schedules)."
    return ["## Schedule", f"The policy evicts {when}{late}. While decoding, {decode} (`decode={rule}`).\n{change}"]
