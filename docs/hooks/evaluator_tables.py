"""The protocols of benchmarks as tables, made from the code that follows them."""

from __future__ import annotations

from kvbench.tasks.longbench.subsets import PAPER_SETS, SUBSETS
from kvbench.tasks.ruler.predictions import PROTOCOLS
from kvbench.tasks.scores import contains_any

ASKS = {
    "niah_single_1": "one number in five repeated sentences",
    "niah_single_2": "one number in essays",
    "niah_single_3": "one UUID in essays",
    "niah_multikey_1": "one of four keys in essays",
    "niah_multikey_2": "one key where every line is a needle",
    "niah_multikey_3": "one UUID of UUIDs, every line a needle",
    "niah_multivalue": "four numbers of one key",
    "niah_multiquery": "four keys",
    "vt": "which variables have a value, through four assignments",
    "cwe": "the ten most common words",
    "fwe": "the three most frequent coded words",
    "qa_1": "a question of SQuAD, its paragraph among others",
    "qa_2": "a question of HotpotQA",
}


def longbench() -> str:
    """Every subset: how it is asked and scored."""
    lines = ["| subset | kind | examples | new tokens | metric | chat | first line only | in the 16 |"]
    lines.append("|---|---|---:|---:|---|---|---|---|")
    for one in SUBSETS.values():
        marks = " | ".join("yes" if true else "" for true in (one.chat, one.first_line, one.name in PAPER_SETS))
        kind = f"{one.category} ({one.language})"
        lines.append(f"| `{one.name}` | {kind} | {one.rows} | {one.max_new_tokens} | {one.metric} | {marks} |")
    return "\n".join(lines)


def ruler() -> str:
    """Every task: what it asks for, and how it is scored."""
    lines = ["| task | asks for | new tokens | score |", "|---|---|---:|---|"]
    for name, one in PROTOCOLS.items():
        score = "any" if one.match is contains_any else "all"
        lines.append(f"| `{name}` | {ASKS[name]} | {one.max_new_tokens} | {score} |")
    return "\n".join(lines)
