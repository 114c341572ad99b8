"""The protocol of LongBench's 21 subsets, as data: `tasks/data/longbench_subsets.json`."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.tasks.words import shipped


@dataclass(frozen=True)
class Subset:
    """Prompt and scoring of one subset.

    metric: a key of `metrics.METRICS`. rows: in the official file. prompt: with slots {context} and {input}. chat:
    wrapped in the model's chat template. first_line: only the first line of an answer is scored. newline_ends: a
    newline token ends the answer as EOS does, and neither may be the first new token.
    Source: THUDM/LongBench at 2e00731, pred.py, eval.py and config/ in folder LongBench.
    """

    name: str
    category: str
    language: str
    metric: str
    max_new_tokens: int
    rows: int
    prompt: str
    chat: bool = True
    first_line: bool = False
    newline_ends: bool = False


SUBSETS = {row["name"]: Subset(**row) for row in shipped("longbench_subsets.json")["subsets"]}

# Papers on KV caches print the mean of these subsets: all but the Chinese ones.
PAPER_SETS = tuple(name for name, subset in SUBSETS.items() if subset.language != "zh")

# LongBench-E has other rows of these subsets, spread evenly over three bins of length.
EXTENDED = tuple(name for name in PAPER_SETS if name not in ("narrativeqa", "musique", "qmsum"))
