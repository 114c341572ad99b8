"""Tables of the protocols of benchmarks, made from their code."""

from __future__ import annotations

from ledger_pages import table

from kvbench.tasks.longbench.subsets import PAPER_SETS, SUBSETS
from kvbench.tasks.ruler.predictions import PROTOCOLS
from kvbench.tasks.scores import contains_any

CONTENTS = {
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
    """Every subset: its prompt and its metric."""
    columns = ("subset", "kind", "examples:", "new tokens:", "metric", "chat", "first line only", "in the 16")
    rows = []
    for one in SUBSETS.values():
        marks = ("yes" if true else "" for true in (one.chat, one.first_line, one.name in PAPER_SETS))
        kind = f"{one.category} ({one.language})"
        rows.append((f"`{one.name}`", kind, one.rows, one.max_new_tokens, one.metric, *marks))
    return table(columns, rows)


def ruler() -> str:
    """Every task: its content and its score."""
    rows = [
        (f"`{name}`", CONTENTS[name], one.max_new_tokens, "any" if one.match is contains_any else "all")
        for name, one in PROTOCOLS.items()
    ]
    return table(("task", "content", "new tokens:", "score"), rows)
