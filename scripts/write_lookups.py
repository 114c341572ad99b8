"""Write tasks/data/lookups/triviaqa.jsonl: rows in LongBench's format that the pocket model can answer.

    python scripts/write_lookups.py

Each row is an example of the task niah_multikey: eight secret numbers among written sentences, and a question for one
of them. LongBench's triviaqa puts `input` at the end of the prompt; here it is the question that the pocket model was
trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvbench.tasks.longbench.subsets import SUBSETS
from kvbench.tasks.niah import Niah
from kvbench.tasks.task import PlainTokenizer

PATH = Path(__file__).parents[1] / "tasks" / "data" / "lookups" / "triviaqa.jsonl"
LENGTH = 2048  # tokens of the pocket model, of prompt and answer together
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SEED = 14
INPUT = "Question: {question}\nAnswer:"


def rows() -> Iterator[dict[str, Any]]:
    """Two rows for every depth; any five in turn have them all."""
    before, after = SUBSETS["triviaqa"].prompt.replace("{input}", INPUT).split("{context}")
    task = Niah(lengths=(LENGTH,), depths=DEPTHS, keys=8, frame=f"{before}{{context}}{after}")
    tokenizer = PlainTokenizer(AutoTokenizer.from_pretrained(str(files("kvbench") / "pocket")))
    for one in task.examples(tokenizer, SEED):
        context, _, question = one.prompt.removeprefix(before).partition("\n\nQuestion: ")
        yield {
            "input": f"Question: {question}{one.answer_prefix}",
            "context": context,
            "answers": list(one.references),
            "length": len(context.split()),
            "dataset": "triviaqa",
            "language": "en",
            "all_classes": None,
            "_id": f"lookup-{one.index}-depth-{one.metadata['depth']}",
        }


def main() -> None:
    """Write all rows."""
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
