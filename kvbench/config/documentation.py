"""Documentation of parts, read from their docstrings and from the comments of their files."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

from kvbench.config.compose import CONF, Config, find, load, names, read

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
"""The parts of a policy, and what each of them decides."""
KINDS = (
    ("Token scores", lambda config: True),
    ("Scores that use the values", lambda config: bool(config.get("value"))),
    ("Budgets of layers and heads", lambda config: part_name(config, "allocator") != "Uniform"),
    ("Merged tokens", lambda config: part_name(config, "merger") != "Drop"),
    ("Quantized", lambda config: part_name(config, "store") not in ("Dense", "Ragged")),
    ("Prompt rewritten", lambda config: bool(config.get("pre_pass"))),
    ("Sparse attention", lambda config: bool(config.get("reader"))),
    ("No compression", lambda config: config == load(CONF / "policy" / "full.yaml")),
)
_SENTENCE = re.compile(r"(?:^|(?<=[.;:)] ))")


@dataclass
class Documentation:
    """The docstring of a class. idea: its paragraphs, of which those with equations are indented. fields: the meaning
    of each field, also of those that it inherits. source: the paper or code.
    """

    idea: list[str] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    source: str = ""


def documentation(part: type) -> Documentation:
    """The documentation of a part: its own idea and source, and fields of its base classes too."""
    found = Documentation()
    named = [one.name for one in fields(part)] if is_dataclass(part) else []
    for one in part.__mro__:
        own = one is part
        for paragraph in re.split(r"\n[ \t]*\n", inspect.cleandoc(one.__dict__.get("__doc__") or "")):
            if all(line.startswith("    ") for line in paragraph.splitlines()):
                found.idea += [paragraph] * own
                continue
            text, _, source = " ".join(paragraph.split()).partition("Source: ")
            text = re.split(r"(?:^|(?<=\. ))Raises ", text)[0].strip()
            before, entries = _entries(text, named)
            found.fields = {**entries, **found.fields}
            if own:
                found.idea += [before] * bool(before)
                found.source = source or found.source
    return found


def _entries(text: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """A paragraph before its first `field: meaning`, and the meanings."""
    name = rf"`?(?:{'|'.join(map(re.escape, names))})`?" if names else "(?!)"
    start = re.compile(rf"{_SENTENCE.pattern}({name}(?:(?:, | and ){name})*)(?: \([^)]*\))?: ")
    marks = list(start.finditer(text))
    ends = [*(mark.start() for mark in marks), len(text)][1:]
    entries = {}
    for mark, end in zip(marks, ends, strict=True):
        for one in re.split(", | and ", mark[1]):
            entries[one.strip("`")] = text[mark.end() : end].strip()
    return text[: marks[0].start()].strip() if marks else text, entries


def about(file: Path) -> str:
    """The comment at the top of a file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    count = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.removeprefix("#").strip() for line in lines[:count])


def first_sentence(text: str) -> str:
    """The first sentence of a comment."""
    return re.split(r"(?<![.\s])\.(?: |$)", text)[0] + "."


def needed_files(config: Config) -> list[str]:
    """The fields of a policy that need a file, by their path."""
    parts = {part: given for part, given in config.items() if isinstance(given, dict)}
    return [f"policy.{part}.{name}" for part, given in parts.items() for name, value in given.items() if value == ""]


def required(config: Config) -> str:
    """The required fields of a policy on the command line: files, and the layer at which GemFilter filters."""
    layer = " policy.pre_pass.layer=1" * ("layer" in (config.get("pre_pass") or {}))
    return "".join(f" {field}=FILE" for field in needed_files(config)) + layer


def selects(config: Config) -> bool:
    """Whether a policy selects the tokens it keeps."""
    return bool(config.get("scorer") or config.get("pre_pass"))


def methods_of_others(config: Config) -> list[str]:
    """The parts that policies of kvbench do not have: those of a policy that another package computes."""
    return [name for name, part in config.items() if isinstance(part, dict) and name not in (*DECISIONS, "schedule")]


def budgeted(config: Config) -> bool:
    """Whether a policy has a budget."""
    return selects(config) or bool(config.get("reader")) or any(methods_of_others(config))


def when(config: Config) -> str:
    """When a policy evicts, in words."""
    schedule = config.get("schedule") or {}
    prompt = "after the whole prompt"
    if part_name(config, "schedule") == "Blocks":
        prompt = f"after every block of {schedule.get('size', 128)} prompt tokens (`block=`)"
    rule = schedule.get("decode", "evict")
    decode = {
        "evict": "evicts one token for each new one",
        "grow": "keeps every new token above the budget",
        "threshold": "evicts tokens below the threshold",
        "share": "returns to a share of all tokens seen so far",
    }[rule]
    if (every := schedule.get("every", 1)) > 1:
        decode = f"evicts {every} tokens at once when the budget is exceeded by {every}"
    if schedule.get("protect") == "prompt":
        decode += ", none of them from the prompt"
    late = "; the whole prompt is kept until the first token is decoded" if schedule.get("late") else ""
    return f"It evicts {prompt}{late}; decoding {decode} (`decode={rule}`)."


def part_name(config: Config, decision: str) -> str:
    """The class of a policy's part, `Uniform`."""
    return str((config.get(decision) or {}).get("_target_", "")).rpartition(".")[2]


def families(folders: Sequence[Path] = ()) -> dict[str, tuple[str, ...]]:
    """The policies, each with its variants: names that begin with its name."""
    found: dict[str, list[str]] = {}
    for name in sorted(names("policy", folders), key=len):
        base = max((other for other in found if name.startswith(f"{other}_")), key=len, default=None)
        base = "headkv_r" if name == "headkv_r2" else base  # the same policy with another file of scores
        found.setdefault(base or name, []).extend([name] if base else [])
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def by_kind(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """The policies by kind, without variants; a policy is in the last kind that it fits."""
    found: dict[str, list[str]] = {name: [] for name, _ in KINDS}
    for name in families(folders):
        file = find("policy", name, folders)
        assert file is not None
        config = load(file)
        config = read("policy", name, folders) if "defaults" in config else config
        found[[kind for kind, fits in KINDS if fits(config)][-1]].append(name)
    return found
