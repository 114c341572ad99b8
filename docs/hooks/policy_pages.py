"""A page for every policy, made from its YAML and the docstrings of its parts."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ledger_pages import section, table

from kvbench.config.compose import CONF, Config, names, read, read_all
from kvbench.config.parts import part_class

DECISIONS = {
    "pre_pass": "Extra forward pass before eviction",
    "scorer": "Which tokens stay",
    "value": "Use of the values",
    "selection": "Which tokens stay together",
    "allocator": "Budgets of layers and heads",
    "merger": "Merging of evicted tokens",
    "store": "Storage of kept tokens",
    "reader": "Sparse attention",
}
USUAL = {"Uniform", "Drop", "Dense"}  # the default parts have no section
GROUPS = (
    ("Token scores", lambda config: True),
    ("Scores that use the values", lambda config: bool(config.get("value"))),
    ("Budgets of layers and heads", lambda config: part_name(config, "allocator") != "Uniform"),
    ("Merged tokens", lambda config: part_name(config, "merger") != "Drop"),
    ("Quantized", lambda config: part_name(config, "store") not in ("Dense", "Ragged")),
    ("Prompt rewritten", lambda config: bool(config.get("pre_pass"))),
    ("Sparse attention", lambda config: bool(config.get("reader"))),
    ("No compression", lambda config: config == read("policy", "full")),
)


def part_name(config: Config, decision: str) -> str:
    """The class of a policy's part, `Uniform`."""
    return str((config.get(decision) or {}).get("_target_", "")).rpartition(".")[2]


@cache
def pages() -> dict[str, tuple[str, ...]]:
    """Every policy that has a page, and its variants: names that begin with its name."""
    found: dict[str, list[str]] = {}
    for name in sorted(names("policy"), key=len):
        base = max((page for page in found if name.startswith(f"{page}_")), key=len, default=None)
        base = "headkv_r" if name == "headkv_r2" else base  # the same policy with another file of scores
        found.setdefault(base or name, []).extend([name] if base else [])
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def page_of() -> dict[str, str]:
    """The page of each policy."""
    return {name: page for page, variants in pages().items() for name in (page, *variants)}


def about(name: str) -> str:
    """The comment at the top of a policy's file."""
    lines = (CONF / "policy" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def groups() -> dict[str, list[str]]:
    """The pages by kind; a policy is in the last group that it fits."""
    found: dict[str, list[str]] = {name: [] for name, _ in GROUPS}
    for page in pages():
        config = read("policy", page)
        found[[name for name, fits in GROUPS if fits(config)][-1]].append(page)
    return found


def index_page() -> str:
    """All policies with one sentence each, by group."""
    blocks = ["# Policies", _INTRODUCTION]
    for group, members in groups().items():
        rows = [(f"[`{page}`]({page}.md)", about(page).split(". ")[0].rstrip(".") + ".") for page in members]
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
    budgeted = _chooses(config) or "reader" in config
    boost = 1 if any(name.endswith(f"_{other}") for other in pages()) else 2  # `snapkv` comes before `caote_snapkv`
    file = (CONF / "policy" / f"{name}.yaml").read_text(encoding="utf-8").rstrip()
    blocks = [
        f"---\ntitle: {name}\ndescription: {about(name)!r}\nsearch: {{boost: {boost}}}\n---\n# `{name}`",
        about(name),
        f"    kvbench policy={name}{' budget=256' * budgeted}{_needed(config)}",
        *_decisions(config),
        *(_schedule(config) if _chooses(config) else []),
    ]
    if differences := section((name, *pages()[name])):
        blocks += ["## Differences between paper, code and numbers", *differences]
    if variants := pages()[name]:
        blocks += ["## Variants", table(("name", "description"), [(f"`{one}`", about(one)) for one in variants])]
    blocks += ["## The file", f"`conf/policy/{name}.yaml`:", f"```yaml\n{file}\n```"]
    return "\n\n".join(blocks) + "\n"


def _needed(config: Config) -> str:
    """Required fields of a policy on the command line: files, and the layer at which GemFilter filters."""
    parts = {part: given for part, given in config.items() if isinstance(given, dict)}
    files = [(part, name) for part, given in parts.items() for name, value in given.items() if value == ""]
    layer = " policy.pre_pass.layer=1" * ("layer" in parts.get("pre_pass", {}))
    return "".join(f" policy.{part}.{name}=FILE" for part, name in files) + layer


def _chooses(config: Config) -> bool:
    """Whether a policy selects the tokens it keeps."""
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
        blocks += ["Nothing is evicted, merged or quantized: the full cache, the baseline of every comparison."]
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
    decode = {"evict": "evicts one token for each new one", "grow": "keeps every new token above the budget"}[rule]
    if (every := schedule.get("every", 1)) > 1:
        decode = f"evicts {every} tokens at once when the budget is exceeded by {every}"
    if schedule.get("protect") == "prompt":
        decode += ", none of them from the prompt"
    late = "; the whole prompt is kept until the first token is decoded" if schedule.get("late") else ""
    set_by = "`schedule=`, `block=` and `decode=` change this: [schedules](../concepts/policy.md#schedules)."
    return ["## Schedule", f"It evicts {when}{late}; decoding {decode} (`decode={rule}`).\n{set_by}"]
